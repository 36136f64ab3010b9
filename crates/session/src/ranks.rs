//! Start and end of a run with several processes, the ranks.
//!
//! A launcher of MPI starts the ranks, and they connect here. For `--nproc_per_node`, and for `torchrun` and its relatives, which
//! provide no MPI, one process starts `mpirun` and waits for it.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use omnigrpo_observe::Console;
use omnigrpo_ops::Device;
use omnigrpo_ranks::{Launch, Launcher, Lifeline, Local, Mpirun, Ranks, Starters};
use omnigrpo_train::checkpoint::{self, TrainerState};

use crate::Session;
use omnigrpo_settings::problem::{EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE, Problem};
use omnigrpo_settings::values::Resolved;
use omnigrpo_settings::{Backend, Settings, binding, flags::Verb};

/// Longest wait for the other ranks after a failure of this one, which they may not know of.
const FAREWELL: Duration = Duration::from_secs(30);
/// Longest wait after a stop, which all ranks know of. The first rank may still send records and messages.
const FAREWELL_OF_A_STOP: Duration = Duration::from_secs(120);
/// Time from a signal that ends `mpirun` to the next one.
const TO_END: Duration = Duration::from_secs(3);
/// Longest wait for the process that starts `mpirun`.
const MEETING: Duration = Duration::from_secs(60);

/// This process as a rank.
pub struct Rank {
    /// Connection with the other ranks.
    pub ranks: Ranks,
    lifeline: Option<Lifeline>,
    _starters: Option<Starters>,
}

/// Result of starting.
pub enum Started {
    /// This process is a rank.
    Rank(Rank),
    /// Other processes were the ranks, and they have ended with this code.
    Ended(u8),
}

/// Connects this process with the other ranks, or starts them by the command `again` and waits for their end.
pub fn start(resolved: &Resolved, again: &[OsString]) -> Result<Started> {
    let alone = Started::Rank(Rank { ranks: Ranks::default(), lifeline: None, _starters: None });
    if !resolved.verb.is_divided() || resolved.settings.io.dry_run {
        return Ok(alone);
    }
    let launch = Launch::read(|name| std::env::var(name).ok())?;
    let wanted = resolved.settings.ranks.nproc_per_node;
    let size = wanted.unwrap_or(1).max(launch.size);
    if size > 1 && resolved.verb == Verb::Generate && resolved.settings.io.prompt.is_some() {
        return Err(Problem::usage("one prompt cannot be divided over several processes")
            .got(format!("`--prompt` and {size} processes"))
            .expected("one process, or rows of `--input`")
            .help("start the program without the launcher, since one process uses all cores")
            .into());
    }
    match (launch.launcher, wanted) {
        (Launcher::None, None | Some(1)) => Ok(alone),
        (Launcher::None, Some(size)) => Ok(Started::Ended(exit_code(mpirun(size, again)?))),
        (_, Some(size)) if size != launch.size => {
            Err(Problem::usage("the launcher has started the processes")
                .got(format!("{} processes, `nproc_per_node` {size}", launch.size))
                .expected("equal numbers, or no `nproc_per_node`")
                .at("--nproc_per_node")
                .into())
        }
        (Launcher::Torch, _) => {
            if launch.local_size < launch.size {
                return Err(Problem::usage(
                    "torchrun and its relatives cannot start ranks on several machines",
                )
                .got(format!("{} processes, {} of them on this machine", launch.size, launch.local_size))
                .expected("a launcher of MPI")
                .help(format!(
                    "write `mpirun -n {} --host HOST,HOST … omnigrpo {} …`",
                    launch.size,
                    resolved.verb.name()
                ))
                .into());
            }
            Ok(Started::Ended(exit_code(beside_torch(&launch, again)?)))
        }
        _ => connect(&launch, &resolved.settings).map(Started::Rank),
    }
}

fn exit_code(code: i32) -> u8 {
    u8::try_from(code).unwrap_or(EXIT_FAILURE)
}

/// Connects the ranks, and ends this process if another rank is lost.
fn connect(launch: &Launch, settings: &Settings) -> Result<Rank> {
    let address = settings.ranks.address.as_deref().map(str::parse::<IpAddr>).transpose();
    let address = address.map_err(|_| {
        Problem::usage("wrong value for `rank_address`")
            .got(settings.ranks.address.clone().unwrap_or_default())
            .expected("an IP address of the first process's machine")
            .at("--rank_address")
    })?;
    let starters = Starters::watch(launch.parent, lost)?;
    let ranks = launch.connect()?;
    let who = format!("process {}", std::process::id());
    let patience = Duration::from_secs(settings.ranks.patience_secs);
    let lifeline = Lifeline::new(&ranks, &who, address, patience, lost)?;
    let ranks = ranks.with_queue(lifeline.queue());
    Ok(Rank { ranks, lifeline: Some(lifeline), _starters: Some(starters) })
}

/// Ends this process because another one of the run has ended, with the status of a run that can be resumed.
fn lost(what: &str) {
    report_loss(what);
    // SAFETY: the call has no preconditions. Handlers of MPI that `exit` would call wait for the lost process.
    unsafe { libc::_exit(EXIT_STOPPED.into()) };
}

/// Writes that a process of the run has ended.
fn report_loss(what: &str) {
    use std::io::Write as _;
    // One write, because all ranks write to the same terminal.
    let text = format!(
        "error: the run has ended: {what}\n  help: what it has stored is complete; repeat the command to resume from it\n"
    );
    let _ = std::io::stderr().write_all(text.as_bytes());
}

impl Rank {
    /// Ends this rank together with the others. If it has failed and the others do not arrive, it reports `failure` and ends them.
    pub fn end(self, failure: Option<&Problem>) {
        let Self { ranks, lifeline, _starters } = self;
        if let Some(problem) = failure.cloned().filter(|_| ranks.size() > 1) {
            let rank = ranks.rank();
            let watch = move || {
                let stopped = problem.exit_code() == EXIT_STOPPED;
                std::thread::sleep(if stopped { FAREWELL_OF_A_STOP } else { FAREWELL });
                use std::io::Write as _;
                let _ = std::io::stderr().write_all(format!("rank {rank}: {problem}\n").as_bytes());
                // SAFETY: the call has no preconditions. The other ranks learn from the closed connection that this one has ended.
                unsafe { libc::_exit(problem.exit_code().into()) };
            };
            drop(std::thread::Builder::new().name("farewell".to_owned()).spawn(watch));
        }
        // A failure of the barrier changes nothing: this rank has ended either way.
        let _ = ranks.barrier();
        drop(lifeline);
    }
}

/// Checks that all ranks have the same version of the program and the same settings, apart from those of a rank.
pub fn check_settings(resolved: &Resolved, ranks: &Ranks) -> Result<()> {
    let own = resolved.values.common().map(|(flag, value)| (flag.name.to_owned(), value));
    let version = ("version of omnigrpo".to_owned(), omnigrpo_observe::version().into());
    Ok(omnigrpo_train::check_ranks(
        ranks,
        "the program or its settings",
        Ok(std::iter::once(version).chain(own).collect()),
    )?)
}

/// Returns the result of this rank if no rank has failed, else the failure of the first rank that has one.
pub fn together<T>(ranks: &Ranks, own: Result<T>) -> Result<T> {
    if ranks.size() == 1 {
        return own;
    }
    let problem = own.as_ref().err().map(|error| Problem::from_error(error.as_ref()));
    let told = problem.as_ref().map(|problem| (problem.exit_code(), problem.to_string()));
    let all: Vec<Option<(u8, String)>> = ranks.share(told)?;
    let first = all.into_iter().enumerate().find_map(|(rank, told)| Some((rank, told?)));
    match first.filter(|(rank, _)| *rank != ranks.rank()) {
        None => own,
        Some((rank, (code, text))) => {
            let what = format!("rank {rank}: {}", text.trim_start_matches("error: "));
            Err(match code {
                EXIT_USAGE => Problem::usage(what),
                EXIT_STOPPED => Problem::stopped(what),
                _ => Problem::failure(what),
            }
            .into())
        }
    }
}

/// Runs `make` on the first rank and then on the others, which find what the first one has left in caches. `ready` is the result of
/// this rank's preparation.
pub fn in_order<T>(ranks: &Ranks, ready: Result<()>, make: impl Fn() -> Result<T>) -> Result<T> {
    let (mut ready, mut made) = (ready, None);
    for of_first in [true, false] {
        let own = match ranks.is_first() == of_first {
            true => std::mem::replace(&mut ready, Ok(())).and_then(|()| make().map(Some)),
            false => Ok(made),
        };
        made = together(ranks, own)?;
    }
    made.context("a rank has made nothing")
}

/// Connects the GPUs of all ranks, unless the settings choose MPI.
pub(crate) fn connect_gpus(session: &Session, settings: &Settings, device: Device) -> Result<()> {
    let (ranks, backend) = (&session.ranks, settings.ranks.backend);
    if ranks.size() == 1 {
        return Ok(());
    }
    let with_gpu = ranks.all_gather(&[u8::from(matches!(device, Device::Gpu(_)))])?;
    if let Some(other) = with_gpu.iter().position(|&own| own != with_gpu[0]) {
        let (gpu, cpu) = if with_gpu[0] == 1 { (0, other) } else { (other, 0) };
        return Err(Problem::failure("the ranks use different devices")
            .got(format!("rank {gpu} has a GPU, rank {cpu} the CPU"))
            .expected("a GPU for every rank, or none")
            .help("start fewer ranks, or write `--device cpu`")
            .into());
    }
    let Device::Gpu(card) = device else {
        return match backend {
            Backend::Nccl => Err(Problem::usage("NCCL connects GPUs only")
                .got("ranks that use the CPU")
                .expected("`auto` or `mpi`, or a GPU for every rank")
                .at("--ddp_backend")
                .into()),
            Backend::Auto | Backend::Mpi => Ok(()),
        };
    };
    if backend == Backend::Mpi {
        session.console.line("gradients: summed in main memory, over MPI");
        return Ok(());
    }
    let name = card.connect(ranks, &settings.env.cuda_folders).map_err(|error| {
        Problem::failure("the GPUs of the ranks cannot be connected")
            .got(error.to_string())
            .help("`--ddp_backend mpi` sums gradients in main memory, without NCCL")
    })?;
    session.console.line(&format!("gradients: summed on the GPUs, over {name}"));
    Ok(())
}

/// Returns the number of threads of a rank: the cores that it may use, divided by the ranks that may use the same cores. Warns if a
/// launcher has bound ranks to single cores.
pub(crate) fn threads(ranks: &Ranks, local: Local, console: &Console) -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
    let own = (local.machine, cores.trim().to_owned());
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let all = ranks.share(own.clone())?;
    let sharing = all.iter().filter(|other| **other == own).count().max(1);
    if let Some(of_machine) = bound_to_one_of(cores.trim(), local.size, Path::new("/sys/devices/system/cpu"))
    {
        console.warning(&format!(
            "the launcher has bound each process to one of {of_machine} cores; `mpirun --bind-to none` gives them all cores"
        ));
    }
    Ok((usable / sharing).max(1))
}

/// Returns the number of the machine's cores if a process may use one core only, and its share as one of `ranks` processes is at
/// least twice that. `allowed` lists the CPUs that it may use, such as `0,4-5`. A core has a CPU for each of its hardware threads;
/// the folder `cpus` of the system describes them.
fn bound_to_one_of(allowed: &str, ranks: usize, cpus: &Path) -> Option<usize> {
    let core = |cpu: usize| {
        let siblings = std::fs::read_to_string(cpus.join(format!("cpu{cpu}/topology/thread_siblings_list")));
        siblings.map_or_else(|_| cpu.to_string(), |siblings| siblings.trim().to_owned())
    };
    let online = std::fs::read_to_string(cpus.join("online")).ok()?;
    let (own, all) = (listed(allowed)?, listed(online.trim())?);
    let count = |list: &[usize]| list.iter().copied().map(core).collect::<BTreeSet<_>>().len();
    (count(&own) == 1 && all.len() >= 2 * own.len() * ranks).then(|| count(&all))
}

/// Returns the numbers of a list of CPUs such as `0,4-5`.
fn listed(list: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        all.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(all)
}

/// Returns the number of gradient leaves: the given one, that of the checkpoint from which the run resumes, or that of the ranks.
pub(crate) fn leaves(settings: &Settings, ranks: &Ranks, output_dir: &Path) -> Result<usize> {
    if let Some(given) = settings.algorithm.split.leaves {
        return Ok(given);
    }
    let saved = saved(settings, output_dir);
    let saved = saved
        .map(|saved| saved.fingerprint.get(binding::LEAVES).and_then(serde_json::Value::as_u64).unwrap_or(1));
    let saved = saved.map(|leaves| leaves as usize).filter(|leaves| leaves.is_multiple_of(ranks.size()));
    Ok(saved.unwrap_or(ranks.size()))
}

/// Returns the state of the checkpoint from which a run in this directory resumes. A checkpoint that cannot be read is reported
/// when the run resumes.
pub(crate) fn saved(settings: &Settings, output_dir: &Path) -> Option<TrainerState> {
    use omnigrpo_train::ResumeFrom;
    let path = match &settings.run.resume.from {
        ResumeFrom::Start => None,
        ResumeFrom::Path(path) => Some(path.clone()),
        ResumeFrom::Newest | ResumeFrom::Must => {
            checkpoint::list(output_dir).ok()?.pop().map(|(_, path)| path)
        }
    };
    checkpoint::read_state(&path?).ok()
}

/// Runs the command `again` as `size` ranks and returns the exit code of the run. A signal to stop is passed on as SIGUSR1, because
/// `mpirun` kills its processes a second after any other one. A second Ctrl-C, SIGTERM or SIGHUP ends the ranks immediately.
fn mpirun(size: usize, again: &[OsString]) -> Result<i32> {
    use std::os::unix::process::CommandExt as _;
    let Some((program, arguments)) = again.split_first() else {
        return Err(Problem::usage("this program cannot be started again as ranks")
            .got(format!("an interactive session, {size} processes"))
            .expected("a script")
            .help(format!("write a script and start it with `mpirun -n {size} python SCRIPT.py`"))
            .into());
    };
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command: Command = Mpirun::find(&path)?.command(size, program.as_ref(), arguments);
    // Ctrl-C of a terminal must not reach `mpirun`.
    let mut child = command.process_group(0).spawn().context("mpirun could not be started")?;
    let id = i32::try_from(child.id()).context("the process of mpirun has no id")?;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1};
    let all = [SIGINT, SIGTERM, SIGUSR1, SIGHUP];
    let handled = all.into_iter().filter(|&signal| signal != SIGHUP || !is_ignored(signal));
    let mut signals = signal_hook::iterator::Signals::new(handled).context("signals cannot be handled")?;
    // Signal that has ended the ranks immediately, or 0.
    let ended_by = Arc::new(AtomicI32::new(0));
    let ends = Arc::clone(&ended_by);
    let pass_on = move || {
        let mut asked = false;
        for signal in &mut signals {
            // SAFETY: the calls send signals to the process that this one has started, and to its group.
            let send = |to: i32, signal: i32| unsafe { libc::kill(to, signal) };
            if signal == SIGUSR1 || !std::mem::replace(&mut asked, true) {
                send(id, SIGUSR1);
                continue;
            }
            ends.store(signal, Ordering::SeqCst);
            // MPICH's launcher passes SIGTERM on, and a rank ends at the second one. Open MPI's launcher ends the ranks itself.
            for _ in 0..2 {
                send(id, SIGTERM);
                std::thread::sleep(TO_END);
            }
            send(-id, SIGKILL);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(pass_on).context("no thread for signals")?;
    let status = child.wait().context("mpirun cannot be waited for")?;
    match (ended_by.load(Ordering::SeqCst), status.code()) {
        (0, Some(code)) if !is_of_lost_rank(code) => Ok(code),
        (0, code) => {
            // A rank that is left has said which one was lost. If `mpirun` was killed, the ranks cannot write any more.
            if code.is_none() {
                report_loss(&format!("mpirun (process {id}) has ended"));
            }
            Ok(EXIT_STOPPED.into())
        }
        (signal, _) => Ok(128 + signal),
    }
}

/// Returns true if `mpirun` ended with this code because a signal has ended one of its processes. Open MPI then returns 128 plus the
/// signal, and MPICH the signal. MPICH combines the bits of all codes: the others have ended with [`EXIT_STOPPED`].
fn is_of_lost_rank(code: i32) -> bool {
    let (stopped, signals) = (i32::from(EXIT_STOPPED), 31);
    let is_combined = code & stopped == stopped && code | signals == stopped | signals;
    (3..32).contains(&code) || (129..160).contains(&code) || is_combined
}

/// Lets one of the processes of `torchrun` start `mpirun`; the others wait for it and end with its exit code.
fn beside_torch(launch: &Launch, again: &[OsString]) -> Result<i32> {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::{UnixListener, UnixStream};
    let folder = std::env::temp_dir().join(format!(
        "omnigrpo-{}",
        // SAFETY: the call has no preconditions.
        unsafe { libc::geteuid() }
    ));
    std::fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    omnigrpo_guard::cache::own_folder(&folder).with_context(|| format!("{}", folder.display()))?;
    let _starters = Starters::watch(launch.parent, lost)?;
    let port = std::env::var("MASTER_PORT").unwrap_or_default();
    let port: String = port.chars().filter(char::is_ascii_digit).collect();
    // The processes of one launcher have the same parent.
    let place = folder.join(format!("torch-{}-{port}", std::os::unix::process::parent_id()));
    if launch.local_rank > 0 {
        let until = std::time::Instant::now() + MEETING;
        let mut stream = loop {
            match UnixStream::connect(&place) {
                Ok(stream) => break stream,
                Err(_) if std::time::Instant::now() < until => std::thread::sleep(Duration::from_millis(50)),
                Err(error) => {
                    return Err(error)
                        .context("the process with LOCAL_RANK 0 has not started mpirun within 60 s");
                }
            }
        };
        let mut code = [EXIT_STOPPED];
        // Without a code the first process was killed.
        let _ = stream.read_exact(&mut code);
        return Ok(code[0].into());
    }
    drop(std::fs::remove_file(&place));
    let listener = UnixListener::bind(&place).with_context(|| format!("{}", place.display()))?;
    let waiting = Arc::new(std::sync::Mutex::new(Vec::new()));
    let accepted = Arc::clone(&waiting);
    let accept = move || {
        for stream in listener.incoming().flatten() {
            accepted.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(stream);
        }
    };
    std::thread::Builder::new().name("torch".to_owned()).spawn(accept).context("no thread for torchrun")?;
    let code = mpirun(launch.size, again);
    drop(std::fs::remove_file(&place));
    let told = *code.as_ref().unwrap_or(&i32::from(EXIT_FAILURE));
    let told = u8::try_from(told).unwrap_or(EXIT_FAILURE);
    for stream in waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner).iter_mut() {
        // A process that is gone needs no code.
        let _ = stream.write_all(&[told]);
    }
    code
}

/// Returns true if the process was started with a signal ignored, as by `nohup`.
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: with a null action, the call only reads the current action and writes it to a value of its type.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_rank_is_told_from_a_failure_by_the_code_of_mpirun() {
        let lost =
            |codes: &[i32]| codes.iter().copied().filter(|&code| is_of_lost_rank(code)).collect::<Vec<_>>();
        // Codes of the program, of a launcher that cannot start, and of a program that it does not find.
        assert_eq!(lost(&[0, 1, 2, 127, 213, 255]), [0; 0]);
        // SIGKILL and SIGSEGV under Open MPI and MPICH. Under MPICH, also SIGABRT of one rank and the status of another one.
        let all = [137, 139, 9, 11, 75, 75 | 6];
        assert_eq!(lost(&all), all);
    }

    /// Eight CPUs. With two threads per core, CPU n and CPU n + 4 are one core.
    #[test]
    fn a_binding_to_one_core_is_found_with_any_number_of_hardware_threads() {
        let machine = |siblings: fn(usize) -> String| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("online"), "0-7\n").unwrap();
            for cpu in 0..8 {
                let topology = folder.path().join(format!("cpu{cpu}/topology"));
                std::fs::create_dir_all(&topology).unwrap();
                std::fs::write(topology.join("thread_siblings_list"), siblings(cpu) + "\n").unwrap();
            }
            folder
        };
        let one = machine(|cpu| cpu.to_string());
        let two = machine(|cpu| format!("{},{}", cpu % 4, cpu % 4 + 4));
        let bound = |machine: &tempfile::TempDir, allowed: &str, ranks: usize| {
            bound_to_one_of(allowed, ranks, machine.path())
        };
        assert_eq!([bound(&one, "3", 2), bound(&one, "3", 4), bound(&one, "3", 8)], [Some(8), Some(8), None]);
        assert_eq!([bound(&one, "3,7", 2), bound(&one, "0-7", 2)], [None; 2]);
        assert_eq!([bound(&two, "3,7", 2), bound(&two, "3", 2)], [Some(4); 2]);
        // One core is the share of each of four ranks.
        assert_eq!([bound(&two, "3,7", 4), bound(&two, "2-3", 2), bound(&two, "0-7", 2)], [None; 3]);
        let unknown = tempfile::tempdir().unwrap();
        assert_eq!([bound(&unknown, "3", 2), bound(&one, "", 2)], [None; 2]);
    }
}
