//! Names of settings in messages.
//!
//! A library knows the fields of its plans, and the users of a program know flags. So a message holds a [`Setting`], which is
//! written in the words of the running program.

use std::borrow::Cow;
use std::fmt;
use std::sync::OnceLock;

/// A field of a plan, or a choice of a field. It is written as `RunPlan::max_steps`, or as the program names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Type that has the field or the choice.
    pub plan: &'static str,
    /// Name of the field or the choice. A full stop precedes each nested field.
    pub field: &'static str,
}

/// Function that returns a program's name of a setting.
pub type Names = fn(Setting) -> Option<Cow<'static, str>>;

static NAMES: OnceLock<Names> = OnceLock::new();

/// Sets the names that all later messages of this process use. Only the first call has an effect.
pub fn name_settings_by(names: Names) {
    // Only the first function is kept.
    let _ = NAMES.set(names);
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.get().and_then(|names| names(*self)) {
            Some(name) => f.write_str(&name),
            None => write!(f, "{}::{}", self.plan, self.field),
        }
    }
}

/// Declares the settings that the messages of a crate name: a constant for each, for example to write `"lower {MAX_STEPS}"`, and
/// the list `ALL`.
///
/// In `MAX_STEPS = RunPlan.max_steps`, the compiler checks the field, and in `NEWEST = ResumeFrom::Newest` the choice. A colon
/// instead, as in `MAX_STEPS = RunPlan: max_steps`, names a plan of a crate that depends on this one, which the compiler does not
/// check.
///
/// ```
/// struct Plan { steps: u64 }
/// omnigrpo_guard::settings! { STEPS = Plan.steps; }
/// assert_eq!(format!("lower {STEPS}"), "lower Plan::steps");
/// ```
///
/// ```compile_fail
/// struct Plan { steps: u64 }
/// omnigrpo_guard::settings! { STEPS = Plan.step; }
/// ```
#[macro_export]
macro_rules! settings {
    (@value $plan:ident $sep:tt $first:ident $(. $rest:ident)*) => {
        $crate::Setting {
            plan: stringify!($plan),
            field: concat!(stringify!($first) $(, ".", stringify!($rest))*),
        }
    };
    (@check $plan:ident . $($field:tt)+) => { const _: usize = ::std::mem::offset_of!($plan, $($field)+); };
    (@check $plan:ident :: $choice:ident) => { const _: fn() = || { let _ = $plan::$choice; }; };
    (@check $plan:ident : $($field:tt)+) => {};
    ($($name:ident = $plan:ident $sep:tt $first:ident $(. $rest:ident)*;)*) => {
        $(
            pub(crate) const $name: $crate::Setting = $crate::settings!(@value $plan $sep $first $(. $rest)*);
            $crate::settings!(@check $plan $sep $first $(. $rest)*);
        )*

        /// All settings that messages of this crate name.
        pub const ALL: &[$crate::Setting] = &[$($crate::settings!(@value $plan $sep $first $(. $rest)*)),*];
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Inner {
        depth: u8,
    }
    struct Plan {
        inner: Inner,
    }
    enum Choice {
        Never,
    }
    crate::settings! {
        DEPTH = Plan.inner.depth;
        NEVER = Choice::Never;
        ABOVE = Later: steps;
    }

    #[test]
    fn a_setting_has_its_own_name_until_a_program_names_it() {
        let said = || format!("lower {DEPTH}, {NEVER}, {ABOVE}");
        assert_eq!(said(), "lower Plan::inner.depth, Choice::Never, Later::steps");
        assert_eq!(ALL, [DEPTH, NEVER, ABOVE]);
        name_settings_by(|setting| (setting == DEPTH).then_some("--depth".into()));
        name_settings_by(|_| None);
        assert_eq!(said(), "lower --depth, Choice::Never, Later::steps", "the first names stay");
    }
}
