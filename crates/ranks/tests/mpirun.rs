//! Ranks under the `mpirun` of Open MPI and of MPICH. The tests start their own program as the ranks.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::ptr_arg)]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use omnigrpo_ranks::{Cascade, Launch, Lifeline, Mpirun, PATIENCE, Ranks, Result};

/// Variable that gives a process its task as a rank.
const TASK: &str = "RANKS_TEST_TASK";
/// Time after which a test fails instead of hanging.
const LIMIT: Duration = Duration::from_secs(90);

/// Returns the command that runs this program as `size` ranks with a task, for each MPI. Debian installs both side by side.
fn commands(size: usize, task: &str) -> [Command; 2] {
    ["/usr/bin/mpirun.openmpi", "/usr/bin/mpirun.mpich"].map(|path| {
        let Some(mpirun) = Mpirun::at(path.into()) else {
            panic!("{path} is missing: install openmpi-bin and mpich")
        };
        let arguments = ["--exact", "this_process_is_a_rank", "--ignored", "--nocapture"].map(Into::into);
        let mut command = mpirun.command(size, &std::env::current_exe().unwrap(), &arguments);
        command.env(TASK, task).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    })
}

/// Writes a line in one piece, because all ranks write to the same place.
fn say(line: &str) {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// Waits for the end of a child and returns its exit status and what it wrote to stderr. `each` gets the lines as they come.
fn end(mut child: Child, mut each: impl FnMut(&str)) -> (Option<i32>, String) {
    let (send, lines) = channel();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    std::thread::spawn(move || {
        stderr.lines().map_while(std::io::Result::ok).try_for_each(|line| send.send(line))
    });
    let until = Instant::now() + LIMIT;
    let mut all = String::new();
    while let Ok(line) = lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
        each(&line);
        all += &(line + "\n");
    }
    if Instant::now() >= until {
        child.kill().unwrap();
        panic!("the ranks did not end within {} s: {all}", LIMIT.as_secs());
    }
    let code = child.wait().unwrap().code();
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    (code, all + &out)
}

/// Does what the variable says as one of several ranks.
#[test]
#[ignore = "started by the tests below"]
fn this_process_is_a_rank() {
    let Ok(task) = std::env::var(TASK) else { return };
    let launch = Launch::read(|name| std::env::var(name).ok()).unwrap();
    let ranks = launch.connect().unwrap();
    let who = format!("process {}", std::process::id());
    let line = Lifeline::new(&ranks, &who, None, PATIENCE, |what| {
        say(&format!("the run has ended: {what}"));
        // SAFETY: nothing is left to do. Handlers of MPI that `exit` would call wait for the other ranks.
        unsafe { libc::_exit(3) };
    });
    let line = line.unwrap();
    match task.as_str() {
        "check" => check(&ranks),
        _ => {
            say(&format!("rank {} is {who}", ranks.rank()));
            // Ends when a rank is killed; the limit is that of the caller.
            for _ in 0..LIMIT.as_secs() * 100 {
                ranks.all_gather(&[0u8; 1000]).unwrap();
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
    ranks.barrier().unwrap();
    drop(line);
}

fn add(to: &mut Vec<f32>, from: Vec<f32>) -> Result<()> {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
    Ok(())
}

/// Compares each collective with its definition, and a sum over four leaves with that of one process.
fn check(ranks: &Ranks) {
    let (rank, size) = (ranks.rank(), ranks.size());
    let local = ranks.local().unwrap();
    assert_eq!((local.rank, local.size, local.machines), (rank, size, 1));
    let mut root = [rank as u64 + 1; 3];
    ranks.broadcast(size - 1, &mut root).unwrap();
    assert_eq!(root, [size as u64; 3]);
    let each = ranks.share(vec![rank; rank]).unwrap();
    assert_eq!(each, (0..size).map(|rank| vec![rank; rank]).collect::<Vec<_>>());
    let leaf = |index: usize| -> Vec<f32> {
        (0..300_007).map(|i| ((i + index * 91) as f32 * 0.37).sin() * (1.0 + index as f32)).collect()
    };
    let sum = |range: std::ops::Range<usize>| {
        let mut sums = Cascade::default();
        range.for_each(|index| sums.push(Some(leaf(index)), add).unwrap());
        sums.finish(add).unwrap().unwrap()
    };
    let alone = sum(0..4);
    let own = sum(4 * rank / size..4 * (rank + 1) / size);
    let mut together = own.clone();
    together.resize(own.len().next_multiple_of(size), 0.0);
    let mut parts = vec![0.0; together.len()];
    ranks.all_reduce(&mut together, &mut parts).unwrap();
    assert!(
        together.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()),
        "other bits than one process"
    );
    let mut fast = own;
    ranks.sum_by_engine(&mut fast).unwrap();
    let bound = 6e-8 * size as f32 * (1.0 + 2.0 + 3.0 + 4.0);
    assert!(fast.iter().zip(&alone).all(|(a, b)| (a - b).abs() <= bound));
    say(&format!("rank {rank} of {size}: {}", ranks.engine()));
}

#[test]
#[ignore = "needs Open MPI and MPICH"]
fn mpirun_gives_the_bits_of_one_process_with_both_mpis() {
    for size in [2, 4] {
        for (mut command, name) in commands(size, "check").into_iter().zip(["Open MPI", "MPICH"]) {
            let (code, said) = end(command.spawn().unwrap(), |_| {});
            assert_eq!(code, Some(0), "{name}: {said}");
            for rank in 0..size {
                let line = format!("rank {rank} of {size}: {name}");
                assert!(said.contains(&line), "{line:?} is missing: {said}");
            }
        }
    }
}

/// Returns whether a process still runs. Containers often have nobody to remove the entry of one that has ended.
fn runs(id: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|state| !state.is_empty() && !state.starts_with(['Z', 'X']))
}

/// Every rank is killed once, under both.
#[test]
#[ignore = "needs Open MPI and MPICH"]
fn mpirun_ends_all_ranks_if_one_is_killed() {
    for victim in [1, 0] {
        for mut command in commands(2, "wait") {
            let (mut processes, mut killed) = (Vec::new(), None);
            let (code, said) = end(command.spawn().unwrap(), |line| {
                if let Some((_, process)) = line.split_once(" is process ") {
                    processes
                        .push((line.contains(&format!("rank {victim} ")), process.parse::<i32>().unwrap()));
                    if processes.len() == 2 {
                        let id = processes.iter().find(|(own, _)| *own).unwrap().1;
                        // SAFETY: a signal to a process that this test has started.
                        assert_eq!(unsafe { libc::kill(id, libc::SIGKILL) }, 0);
                        killed = Some((Instant::now(), id));
                    }
                }
            });
            let (at, id) = killed.unwrap();
            assert!(
                at.elapsed() < Duration::from_secs(30),
                "the run outlived rank {victim} by {:?}",
                at.elapsed()
            );
            assert!(code != Some(0), "{said}");
            let told = format!("the run has ended: rank {victim} (process {id}) has ended");
            // MPICH reports the process itself, and it may kill the other rank before that one can say so.
            let by_mpich = format!("PID {id} RUNNING AT");
            assert!(said.contains(&told) || said.contains(&by_mpich), "{told:?} is missing: {said}");
            let until = Instant::now() + Duration::from_secs(10);
            for (_, id) in processes {
                while runs(id) {
                    assert!(Instant::now() < until, "process {id} is still there");
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }
}
