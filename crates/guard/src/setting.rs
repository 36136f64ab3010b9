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

type Names = fn(Setting) -> Option<Cow<'static, str>>;

static NAMES: OnceLock<Names> = OnceLock::new();

/// Sets the function that names settings in all later messages of this process. Only the first call has an effect.
pub fn name_settings_by(names: Names) {
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

/// Declares the settings that the messages of a crate name: a constant for each, so that a message is `"lower {MAX_STEPS}"`, and the
/// list `SETTINGS`. The compiler checks the fields of a `struct` and the choices of an `enum`.
///
/// ```compile_fail,E0609
/// struct RunPlan { max_steps: u64 }
/// omnigrpo_guard::settings! { struct RunPlan { MAX_STEPS = steps } }
/// ```
#[macro_export]
macro_rules! settings {
    (@check struct $plan:ident $($field:tt)+) => { const _: usize = ::std::mem::offset_of!($plan, $($field)+); };
    (@check enum $plan:ident $choice:ident) => { const _: fn() = || { let _ = $plan::$choice; }; };
    ($($kind:tt $plan:ident { $($name:ident = $first:ident $(. $rest:ident)*),+ $(,)? })+) => {
        $($(
            pub(crate) const $name: $crate::Setting = $crate::Setting {
                plan: stringify!($plan),
                field: concat!(stringify!($first) $(, ".", stringify!($rest))*),
            };
            $crate::settings!(@check $kind $plan $first $(. $rest)*);
        )+)+
        /// All settings that messages of this crate name.
        pub const SETTINGS: &[$crate::Setting] = &[$($($name),+),+];
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Plan {
        range: std::ops::Range<u8>,
    }
    enum Choice {
        Never,
    }
    crate::settings! {
        struct Plan { RANGE = range, END = range.end }
        enum Choice { NEVER = Never }
    }

    #[test]
    fn a_setting_has_its_own_name_until_a_program_names_it() {
        assert_eq!(SETTINGS, [RANGE, END, NEVER]);
        let said = || format!("lower {END}, {NEVER}");
        assert_eq!(said(), "lower Plan::range.end, Choice::Never");
        name_settings_by(|setting| (setting == END).then_some("--end".into()));
        name_settings_by(|_| None);
        assert_eq!(said(), "lower --end, Choice::Never", "the first names stay");
    }
}
