//! The `omnigrpo` program: the command line, the commands, and messages for users.

pub(crate) mod arguments;
mod bus;
mod draft;
mod heap;
pub(crate) mod help;
#[doc(hidden)]
pub mod translate;
mod verbs;

use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use omnigrpo_observe::Console;
use omnigrpo_ranks::Launch;
use omnigrpo_session::logging::{quiet_guarded_panics, warnings};
use omnigrpo_session::ranks::{self, Started};

use crate::settings::{Problem, Verb, name_flags};
use arguments::Parsed;

/// Names the commit of this build in versions: `OMNIGRPO_COMMIT` of the build, or that of the repository of a release build.
pub fn name_commit() {
    omnigrpo_observe::name_commit(option_env!("OMNIGRPO_COMMIT").unwrap_or_default());
}

/// Runs the program `omnigrpo` with these arguments, of which the first is its name, and returns its exit code.
///
/// It reads environment variables, prints, handles signals and installs a panic hook. So call it once, from a process that does
/// nothing else.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    let mut again = args.clone();
    if let (Some(name), Ok(program)) = (again.first_mut(), std::env::current_exe()) {
        *name = program.into();
    }
    ExitCode::from(run(args, &again))
}

/// Runs the program like [`main`], and returns its exit code as a number. `again` is the command that runs it once more, with the
/// same arguments, as one of several processes.
pub fn run(args: impl IntoIterator<Item = OsString>, again: &[OsString]) -> u8 {
    heap::keep();
    bus::tell();
    bus::write_to_the_limit();
    quiet_guarded_panics();
    name_flags();
    name_commit();
    let env = |name: &str| std::env::var(name).ok();
    let args: Vec<OsString> = args.into_iter().collect();
    let rank = Launch::read(env).map_or(0, |launch| launch.rank);
    // The first of the processes of a run speaks for all of them. Other commands are not divided, and each process speaks.
    let is_divided =
        |word: &OsString| Verb::ALL.iter().any(|verb| verb.is_divided() && *word == *verb.name());
    let is_first = rank == 0 || args.get(1).is_none_or(|word| !is_divided(word));
    let console = match is_first {
        true => Console::stderr(wants_colour(env, std::io::stderr().is_terminal())),
        false => Console::plain(std::io::sink()),
    };
    // This cannot fail: no other subscriber is set yet, since this is one of the program's first actions.
    let _ = tracing::subscriber::set_global_default(warnings(&console));
    let parsed = arguments::parse(args.iter().cloned(), env);
    // Clients choose how much memory their requests take, so a server returns all of it.
    if matches!(&parsed, Ok(Parsed::Run(resolved)) if resolved.verb == Verb::Serve) {
        heap::share();
    }
    let problem = match parsed {
        Ok(Parsed::Print(text)) => {
            // A closed pipe (`| head`) is not an error.
            if is_first {
                let _ = write!(std::io::stdout().lock(), "{text}");
            }
            return 0;
        }
        Ok(Parsed::Run(resolved)) => match ranks::start(&resolved, again) {
            Ok(Started::Ended(code)) => return code,
            Ok(Started::Rank(rank)) => {
                let problem = verbs::run(&resolved, &console, rank.ranks.clone())
                    .err()
                    .map(|error| Problem::from_error(error.as_ref()));
                rank.end(problem.as_ref());
                let Some(problem) = problem else { return 0 };
                problem
            }
            Err(error) => {
                let problem = Problem::from_error(error.as_ref());
                if !is_first {
                    // Not connected, so the first process does not know of it.
                    let _ = writeln!(std::io::stderr(), "rank {rank}: {problem}");
                }
                problem
            }
        },
        Err(problem) => problem,
    };
    console.error(&problem.to_string());
    problem.exit_code()
}

/// Returns true for a terminal with colours, unless `NO_COLOR` is set to any text (no-color.org).
fn wants_colour(env: impl Fn(&str) -> Option<String>, is_terminal: bool) -> bool {
    let no = env("NO_COLOR").is_some_and(|value| !value.is_empty());
    is_terminal && !no && env("TERM").is_none_or(|term| term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::wants_colour;

    #[test]
    fn colour_is_for_terminals_that_want_it() {
        let env = |list: &'static [(&str, &str)]| {
            move |name: &str| list.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        assert!(wants_colour(env(&[]), true) && wants_colour(env(&[("NO_COLOR", "")]), true));
        assert!(!wants_colour(env(&[]), false));
        assert!(!wants_colour(env(&[("NO_COLOR", "1")]), true));
        assert!(!wants_colour(env(&[("TERM", "dumb")]), true));
    }
}
