//! A directory with a few rows and the tiny checkpoints of the `models` tests, and the real program on them.

pub mod published;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

pub use omnigrpo_testkit::golden;

pub const ROWS: &str = concat!(
    r#"{"id": "shapes", "image": "shapes.png", "problem": "<image>\nWhich shape is red?", "solution": "<answer>square</answer>", "kind": "shape"}"#,
    "\n",
    r#"{"id": "sum", "problem": "What is 2+3?", "solution": "<answer>5</answer>", "kind": "number"}"#,
    "\n",
    r#"{"id": "clip", "video": "clip.gif", "min_pixels": 3136, "max_pixels": 12544, "problem": "<video>Which way?", "solution": "<answer>right</answer>", "kind": "shape"}"#,
    "\n",
);

/// Exit code and output of the program.
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Fails unless the exit code is 0.
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self
    }

    /// Fails unless the exit code is `code` and standard error holds every part.
    pub fn fails(self, code: i32, parts: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        assert!(self.stderr.contains("error: ") && !self.stderr.contains("panicked"), "{}", self.stderr);
        // Texts that `{:?}` and `serde` write for values and types.
        let rust =
            ["Some(", "Error(", "Error {", "Semantic(", "invalid type:", "invalid value:", "untagged enum"];
        assert!(!rust.iter().any(|rust| self.stderr.contains(rust)), "a name of Rust is in\n{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "`{part}` is not in\n{}", self.stderr);
        }
        self
    }
}

/// A working directory.
pub struct Place(tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        place.write("rows.jsonl", ROWS);
        for name in ["shapes.png", "noise.png", "alpha.png", "clip.gif", "rise.wav"] {
            fs::copy(golden("media").join(name), place.path(name)).unwrap();
        }
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    /// Rewrites a file of a checkpoint and its checksum, so that it does not count as damaged.
    pub fn rewrite_of_checkpoint(&self, folder: &str, name: &str, content: &str) {
        let sum = |text: &str| -> String {
            Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let (path, sums) = (format!("{folder}/{name}"), format!("{folder}/SHA256SUMS"));
        let before = self.text(&sums);
        let after = before.replace(&sum(&self.text(&path)), &sum(content));
        assert_ne!(before, after);
        self.write(&sums, after);
        self.write(&path, content);
    }

    pub fn exists(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    pub fn lines(&self, name: &str) -> Vec<Value> {
        self.text(name).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Names in a directory, sorted.
    pub fn names(&self, dir: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(dir)) else { return Vec::new() };
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Returns the command of a line of words; `M` is the tiny checkpoint.
    pub fn command(&self, line: &str) -> Command {
        let model = golden("checkpoints/qwen2_5_vl_tied").display().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_omnigrpo"));
        command.args(line.split_whitespace().map(|word| if word == "M" { model.as_str() } else { word }));
        command.current_dir(self.0.path()).stdin(Stdio::null());
        // No file of the user and no network is used.
        command.env("XDG_CACHE_HOME", self.path(".cache")).env("HF_HUB_OFFLINE", "1").env_remove("HF_HOME");
        command
    }

    /// Returns the command of a line of words under a limit of the shell, such as `-v 3000000` for an address space in KiB.
    pub fn limited(&self, limit: &str, line: &str) -> Command {
        let program = self.command(line);
        let mut command = Command::new("bash");
        command.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "bash"]).arg(program.get_program());
        command.args(program.get_args()).current_dir(self.0.path()).stdin(Stdio::null());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    pub fn run(&self, line: &str) -> Ran {
        self.run_with(line, &[])
    }

    /// Runs the program like `run`, with additional arguments that may contain spaces.
    pub fn run_with(&self, line: &str, more: &[&str]) -> Ran {
        ran(self.command(line).args(more))
    }

    /// Copies the tiny checkpoint.
    pub fn copied_checkpoint(&self, name: &str) {
        let from = golden("checkpoints/qwen2_5_vl_tied");
        fs::create_dir(self.path(name)).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let file = entry.unwrap().path();
            fs::copy(&file, self.path(name).join(file.file_name().unwrap())).unwrap();
        }
    }

    /// Copies the tiny checkpoint with changes to the header and the bytes of its weight file.
    pub fn checkpoint(&self, name: &str, change: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
        self.copied_checkpoint(name);
        let path = self.path(name).join("model.safetensors");
        let all = fs::read(&path).unwrap();
        let split = 8 + u64::from_le_bytes(all[..8].try_into().unwrap()) as usize;
        let mut header = serde_json::from_slice(&all[8..split]).unwrap();
        let mut data = all[split..].to_vec();
        change(&mut header, &mut data);
        let header = json!(header).to_string();
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        out.extend(data);
        fs::write(path, out).unwrap();
    }
}

pub fn ran(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Returns a file as a `data:` address.
pub fn data_address(bytes: &[u8], kind: &str) -> String {
    use base64::Engine as _;
    format!("data:{kind};base64,{}", base64::engine::general_purpose::STANDARD.encode(bytes))
}

/// Starts a server on this machine that answers a path with `content`, or with 404. It ends with the test process.
pub fn server(
    content: impl Fn(&str) -> Option<Vec<u8>> + Send + 'static,
) -> (std::net::SocketAddr, Arc<Mutex<Vec<String>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&asked);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut head = String::new();
            while reader.read_line(&mut head).unwrap_or(0) > 2 {}
            let path = head.split(' ').nth(1).unwrap_or_default();
            record.lock().unwrap().push(path.to_owned());
            let (status, body) = content(path).map_or((404, Vec::new()), |body| (200, body));
            let head =
                format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
            let mut stream = reader.into_inner();
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
        }
    });
    (address, asked)
}

/// Returns the last tensor of the file, and where its bytes start.
pub fn last_tensor(header: &Map<String, Value>) -> (String, usize) {
    let at = |value: &Value, i: usize| value["data_offsets"][i].as_u64().unwrap_or(0);
    let (name, value) = header.iter().max_by_key(|(_, value)| at(value, 1)).unwrap();
    (name.clone(), at(value, 0) as usize)
}

pub fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Returns true if a path appears within 20 seconds.
pub fn appears(path: &Path) -> bool {
    (0..4000).any(|_| {
        if !path.exists() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        path.exists()
    })
}
