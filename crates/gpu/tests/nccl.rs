//! Exchanges between emulators, which are the GPUs of ranks on threads, over the stand-in of NCCL.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use omnigrpo_gpu::{Array, Dtype, Error, Gpu, Nccl};
use omnigrpo_ranks::{Ranks, Threads};

/// Runs `body` as each of `size` ranks with an emulator each, and returns their results.
fn on<T: Send>(size: usize, body: impl Fn(&Gpu, &Ranks, Result<Nccl, Error>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let rank = |engine: Threads| {
            let (gpu, ranks) = (Gpu::emulated(1), Ranks::new(engine));
            let nccl = Nccl::connect(&gpu, &ranks, &[]);
            body(&gpu, &ranks, nccl)
        };
        let all: Vec<_> =
            Threads::new(size).into_iter().map(|engine| scope.spawn(move || rank(engine))).collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns numbers of a rank whose sums depend on their order.
fn numbers(rank: usize, len: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 31 + rank * 17) as f32 * 0.7).sin() * 10f32.powi((rank % 5) as i32 - 2);
    (0..len).map(number).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn empty(gpu: &Gpu, len: usize) -> Array {
    gpu.alloc(len, Dtype::F32)
}

/// The sum over cards has the bits of the sum in main memory. Lengths are above and below that of a piece of the stand-in.
#[test]
fn a_sum_on_gpus_has_the_bits_of_one_in_main_memory() {
    for (size, len) in [(1, 5), (2, 1), (2, 70_000), (3, 33), (4, 1000)] {
        let sums = on(size, |gpu, ranks, nccl| {
            let (nccl, own) = (nccl.unwrap(), numbers(ranks.rank(), size * len));
            let mut parts = empty(gpu, size * len);
            nccl.all_to_all(&gpu.upload(&own), &mut parts);
            let (mut sum, mut all) = (empty(gpu, len), empty(gpu, size * len));
            gpu.fold_blocks(&mut sum, &mut parts);
            nccl.all_gather(&sum, &mut all);
            gpu.check().unwrap();
            let (mut expected, mut parts) = (own, vec![0.0; size * len]);
            ranks.all_reduce(&mut expected, &mut parts).unwrap();
            (bits(&all.to_vec()), bits(&expected))
        });
        for (sum, expected) in &sums {
            assert!(sum == expected && *sum == sums[0].0, "{size} ranks, {len} numbers");
        }
    }
}

#[test]
fn the_sum_of_the_engine_and_broadcasts_reach_all_ranks() {
    let len = 1001;
    for (rank, (sum, root)) in on(3, |gpu, ranks, nccl| {
        let nccl = nccl.unwrap();
        assert_eq!(nccl.name(), "NCCL 2.28");
        let (mut sum, mut root) =
            (gpu.upload(&numbers(ranks.rank(), len)), gpu.upload(&numbers(ranks.rank(), len)));
        nccl.sum(&mut sum);
        nccl.broadcast(2, &mut root);
        gpu.check().unwrap();
        (sum.to_vec(), root.to_vec())
    })
    .into_iter()
    .enumerate()
    {
        let each: Vec<_> = (0..3).map(|rank| numbers(rank, len)).collect();
        for (i, sum) in sum.into_iter().enumerate() {
            let expected: f64 = each.iter().map(|own| f64::from(own[i])).sum();
            let magnitude: f64 = each.iter().map(|own| f64::from(own[i].abs())).sum();
            assert!((f64::from(sum) - expected).abs() <= 3.0 * 6e-8 * magnitude, "rank {rank}, number {i}");
        }
        assert_eq!(bits(&root), bits(&each[2]));
    }
}

/// Prints the failures of two ranks. The tests below run it in another process, because variables set the fault.
#[test]
#[ignore = "started by the tests below"]
fn this_process_says_how_ranks_fail() {
    let started = Instant::now();
    for said in on(2, |gpu, _, nccl| {
        let nccl = match nccl {
            Ok(nccl) => nccl,
            Err(error) => return error.to_string(),
        };
        for _ in 0..3 {
            let mut all = empty(gpu, 20);
            nccl.all_gather(&gpu.upload(&[1.0; 10]), &mut all);
        }
        // Later work does nothing, and the failure stays.
        drop(nccl);
        gpu.check().unwrap_err().to_string()
    }) {
        println!("{said}");
    }
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

/// Returns what ranks say in a process with a variable.
fn said_with(variable: &str, value: &str) -> String {
    let own = ["--exact", "this_process_says_how_ranks_fail", "--ignored", "--nocapture"];
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(own).env(variable, value).stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = command.spawn().unwrap();
    let id = libc::pid_t::try_from(run.id()).unwrap();
    let (ended, waits) = mpsc::channel();
    // A process that hangs is killed.
    let guard = thread::spawn(move || {
        if waits.recv_timeout(Duration::from_secs(120)) == Err(mpsc::RecvTimeoutError::Timeout) {
            // SAFETY: the process is a child that has not been waited for.
            unsafe { libc::kill(id, libc::SIGKILL) };
        }
    });
    let run = run.wait_with_output().unwrap();
    ended.send(()).unwrap();
    guard.join().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap()
}

/// An exchange that never ends is ended on all ranks, and each has the failure.
#[test]
fn a_lost_connection_is_a_failure_on_all_ranks() {
    let said = said_with("STAND_IN_NCCL_FAULT", "2");
    let named = said.lines().filter(|line| line.contains("NCCL_DEBUG=INFO"));
    assert_eq!(named.count(), 2, "{said}");
    assert!(said.contains("unhandled system error") || said.contains("remote process exited"), "{said}");
}

#[test]
fn an_old_library_is_refused_on_all_ranks() {
    let said = said_with("STAND_IN_NCCL", "21705");
    let named =
        said.lines().filter(|line| line.contains("libnccl.so.2 is version 2.17, expected 2.18 or newer"));
    assert_eq!(named.count(), 2, "{said}");
    assert!(said.contains("pip install -U 'nvidia-nccl-cu13'"), "{said}");
}
