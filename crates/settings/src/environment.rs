//! Environment variables. Only this module reads them.

use std::cmp::Reverse;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use omnigrpo_ranks::Launch;

use crate::layer::is_secret;

/// Name of the file of `DEBUG_MODE` without `LOG_PATH`.
pub const DEBUG_LOG: &str = "grpo_debug.log";
/// Least length of a value that is hidden, in bytes. To hide a shorter one would damage words of messages.
const MIN_SECRET_BYTES: usize = 8;

/// Values of the environment variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// True if `WANDB_DISABLED` is true; `report_to wandb` then has no effect.
    pub wandb_disabled: bool,
    /// `EXP_NAME`, the name of a run that has no other name.
    pub exp_name: Option<String>,
    /// Number of processes that a launcher started; 0 or 1 without one.
    pub processes: usize,
    /// True if `accelerate launch` was to start several processes and has started this one alone, as it does without GPUs.
    pub is_alone: bool,
    /// File to which completions are logged in the source systems' format: `LOG_PATH` with `DEBUG_MODE`.
    pub debug_log: Option<PathBuf>,
    /// True if `DS_SKIP_CUDA_CHECK` is true. The variable has no effect; a note tells the user so.
    pub ds_skip_cuda_check: bool,
    /// `CUDA_VISIBLE_DEVICES`, as the driver reads it.
    pub cuda_visible_devices: Option<String>,
    /// Directories that may contain CUDA's libraries: `CUDA_HOME`, `CUDA_PATH`, the Python environments of `VIRTUAL_ENV`,
    /// `CONDA_PREFIX` and the user, and the usual directories of operating systems.
    pub cuda_folders: Vec<PathBuf>,
    /// `HOME`.
    pub home: Option<String>,
    /// File with the passwords of machines: `NETRC`, or `~/.netrc`.
    pub netrc: Option<PathBuf>,
    /// Variables of the Hugging Face hub.
    pub hub: HubEnvironment,
    /// Directory `omnigrpo` in `XDG_CACHE_HOME`, or in `.cache` of `HOME` if that variable is unset.
    pub cache_dir: PathBuf,
    /// `OMNIGRPO_API_KEY`, the key of clients of `serve`; never printed.
    pub api_key: Option<String>,
    /// `OPENAI_API_KEY`, sent to a `judge:` as a bearer token and never printed.
    pub judge_api_key: Option<String>,
}

/// The variables of `huggingface_hub`, with its defaults.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct HubEnvironment {
    /// `HF_HUB_CACHE`, else `hub` in `HF_HOME`. The default of `HF_HOME` is `huggingface` in the cache of the user.
    pub cache: PathBuf,
    /// `HF_ENDPOINT`.
    pub endpoint: String,
    /// `HF_TOKEN`; never printed.
    pub token: Option<String>,
    /// `HF_TOKEN_PATH`, the file in which `hf auth login` stores a token.
    pub token_file: PathBuf,
    /// True if `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is true.
    pub offline: bool,
}

impl std::fmt::Debug for HubEnvironment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubEnvironment").field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl HubEnvironment {
    fn read(get: &dyn Fn(&str) -> Option<String>, user_cache: &Path) -> Self {
        let path = |name: &str| get(name).map(PathBuf::from);
        let home = path("HF_HOME").unwrap_or_else(|| user_cache.join("huggingface"));
        Self {
            cache: path("HF_HUB_CACHE")
                .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
                .unwrap_or_else(|| home.join("hub")),
            endpoint: get("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned()),
            token: get("HF_TOKEN")
                .or_else(|| get("HUGGING_FACE_HUB_TOKEN"))
                .map(|token| token.trim().to_owned()),
            token_file: path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token")),
            offline: on(get, "HF_HUB_OFFLINE") || on(get, "TRANSFORMERS_OFFLINE"),
        }
    }
}

fn on(get: &dyn Fn(&str) -> Option<String>, name: &str) -> bool {
    get(name).is_some_and(|v| matches!(v.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on"))
}

/// Returns the values of variables that are keys by their names, such as `WANDB_API_KEY` and `HF_TOKEN`, and the stored keys, sorted by
/// length, the longest first. Each line of a value is a secret of its own. Leaves out lines of fewer than 8 bytes, which could be parts of
/// other words, and values that are paths of existing files.
pub fn secrets(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    stored: impl IntoIterator<Item = String>,
) -> Vec<String> {
    let secret = |(name, value): (OsString, OsString)| {
        let (name, value) = (name.into_string().ok()?.to_ascii_lowercase(), value.into_string().ok()?);
        let is_path = value.starts_with('/') && Path::new(&value).exists();
        (!is_path && (is_secret(&name) || name.ends_with("_key"))).then_some(value)
    };
    let found: Vec<String> = variables.into_iter().filter_map(secret).chain(stored).collect();
    let lines = found.iter().flat_map(|value| value.lines()).map(str::trim);
    let mut found: Vec<String> =
        lines.filter(|line| line.len() >= MIN_SECRET_BYTES).map(str::to_owned).collect();
    found.sort_by_key(|value| Reverse(value.len()));
    found
}

/// Returns the passwords in the text of [`Environment::netrc`], where `wandb login` stores its key.
pub fn passwords(netrc: &str) -> Vec<String> {
    let (mut words, mut found) = (netrc.split_whitespace(), Vec::new());
    while let Some(word) = words.next() {
        let value =
            if matches!(word, "machine" | "login" | "account" | "password") { words.next() } else { None };
        found.extend(value.filter(|_| word == "password").map(|value| value.trim_matches('"').to_owned()));
    }
    found
}

impl Environment {
    /// Returns the directory in which `data check` and `plan` cache headers of media files. Runs cache them in their own directory.
    pub fn check_cache(&self) -> PathBuf {
        self.cache_dir.join("check")
    }

    /// Returns the directory for media that an environment adds to completions outside of a run.
    pub fn turn_cache(&self) -> PathBuf {
        omnigrpo_data::turn_folder(&self.cache_dir)
    }

    /// Reads the variables through `get`.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Self {
        // An empty CUDA_VISIBLE_DEVICES hides every card; other empty variables count as unset.
        let cuda_visible_devices = get("CUDA_VISIBLE_DEVICES");
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let user_cache = get("XDG_CACHE_HOME").map(PathBuf::from);
        let user_cache = user_cache
            .or_else(|| Some(PathBuf::from(get("HOME")?).join(".cache")))
            .unwrap_or_else(|| PathBuf::from(".cache"));
        // A launcher whose variables are wrong is reported where the processes connect.
        let launch = Launch::read(get);
        Self {
            wandb_disabled: on(&get, "WANDB_DISABLED"),
            exp_name: get("EXP_NAME"),
            is_alone: matches!(&launch, Ok(launch) if launch.size == 1)
                && ["ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"].iter().all(|name| get(name).is_some())
                && get("WORLD_SIZE").is_none(),
            processes: launch.map_or(1, |launch| launch.size),
            debug_log: on(&get, "DEBUG_MODE")
                .then(|| get("LOG_PATH").map_or_else(|| PathBuf::from(DEBUG_LOG), PathBuf::from)),
            ds_skip_cuda_check: on(&get, "DS_SKIP_CUDA_CHECK"),
            cuda_visible_devices,
            cuda_folders: ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"]
                .into_iter()
                .filter_map(&get)
                .map(PathBuf::from)
                .chain(get("HOME").map(|home| PathBuf::from(home).join(".local")))
                .chain(["/usr/local/cuda", "/usr/local", "/usr"].map(PathBuf::from))
                .collect(),
            netrc: get("NETRC")
                .map(PathBuf::from)
                .or_else(|| Some(PathBuf::from(get("HOME")?).join(".netrc"))),
            home: get("HOME"),
            hub: HubEnvironment::read(&get, &user_cache),
            cache_dir: user_cache.join("omnigrpo"),
            api_key: get("OMNIGRPO_API_KEY"),
            judge_api_key: get("OPENAI_API_KEY"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_with_keys_are_known_by_their_names() {
        let variables = [
            ("WANDB_API_KEY", "0123456789"),
            ("HF_TOKEN", " hf_0123456789\n"),
            ("AWS_SECRET_ACCESS_KEY", "abcdefgh"),
            ("SMTP_PASS", "a password"),
            ("GH_PAT", "github_pat_1"),
            ("DEPLOY_KEY", "-----BEGIN KEY-----\nMIIEpAIBAAK\nx\n"),
            ("COMPASS", "north by east"),
            ("OLD_PWD", "/proc/self/"),
            ("TRACKIO_PROJECT", "a project"),
            ("TOKENIZERS_PARALLELISM", "false false"),
            ("SOME_TOKEN", "1"),
        ];
        let variables = variables.map(|(name, value)| (name.into(), value.into()));
        let all = [
            "-----BEGIN KEY-----",
            "hf_0123456789",
            "github_pat_1",
            "MIIEpAIBAAK",
            "0123456789",
            "a password",
            "abcdefgh",
        ];
        assert_eq!(secrets(variables.clone(), Some("1".into())), all);
        // A longer text hides first, so that no part of it is left.
        let found = secrets(variables, Some("abcdefgh-and-much-more".into()));
        assert_eq!(found[0], "abcdefgh-and-much-more");
        assert_eq!(found[1..], all);
    }

    #[test]
    fn passwords_of_a_netrc_are_found() {
        let text = "machine api.wandb.ai\n  login user\n  password 0123456789\nmachine b login password password \"d\"\npassword";
        assert_eq!(passwords(text), ["0123456789", "d"]);
        assert!(passwords("").is_empty());
    }

    /// `accelerate` 1.15 sets the address of a group and no size of it.
    #[test]
    fn a_process_of_accelerate_knows_that_it_is_alone() {
        let is_alone =
            |names: &[&str]| Environment::read(|name| names.contains(&name).then(|| "1".to_owned())).is_alone;
        let of_accelerate = ["ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"];
        assert!(is_alone(&of_accelerate));
        assert!(!is_alone(&of_accelerate[..1]) && !is_alone(&of_accelerate[1..]));
        assert!(!is_alone(&[&of_accelerate[..], &["WORLD_SIZE"]].concat()));
    }

    #[test]
    fn the_hub_is_where_its_python_library_has_it() {
        let read = |variables: &[(&str, &str)]| {
            let found =
                |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
            Environment::read(found)
        };
        let plain = read(&[("HOME", "/h"), ("HF_TOKEN", ""), ("HF_ENDPOINT", "")]);
        assert_eq!(plain.hub.cache, PathBuf::from("/h/.cache/huggingface/hub"));
        assert_eq!(plain.hub.token_file, PathBuf::from("/h/.cache/huggingface/token"));
        assert_eq!((plain.hub.endpoint.as_str(), &plain.hub.token), ("https://huggingface.co", &None));
        assert_eq!((plain.cache_dir, plain.hub.offline), (PathBuf::from("/h/.cache/omnigrpo"), false));
        let home = [("HOME", "/h"), ("XDG_CACHE_HOME", "/c"), ("HF_HOME", "/f"), ("HF_HUB_OFFLINE", "1")];
        let moved = read(&home);
        assert_eq!((moved.hub.cache, moved.hub.offline), (PathBuf::from("/f/hub"), true));
        assert_eq!(moved.cache_dir, PathBuf::from("/c/omnigrpo"));
        let named = read(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/k"), ("HF_TOKEN", "secret\n")]);
        assert_eq!(
            (named.hub.cache.as_path(), named.hub.token.as_deref()),
            (Path::new("/k"), Some("secret"))
        );
        assert!(!format!("{named:?}").contains("secret"));
    }
}
