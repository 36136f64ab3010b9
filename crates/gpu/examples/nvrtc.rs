//! Compiles all kernels for all architectures, or for the given ones, without a GPU, and checks the assembler's report.
//!
//! Run `cargo run -p omnigrpo-gpu --example nvrtc -- FOLDER [ARCHITECTURE…]` with a folder that contains NVRTC, such as
//! `site-packages`; `tools/gpu/fetch_nvrtc` downloads one. The program fails if a kernel does not compile, needs more
//! registers than a multiprocessor has for its threads, needs more static shared memory than 48 KiB, or spills
//! registers, or if a compilation cannot be ended early.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use omnigrpo_gpu::nvrtc::Nvrtc;
use omnigrpo_gpu::{Error, sources};

/// Architectures: Ampere, its workstation variant, Ada, Hopper, Blackwell, its workstation variant.
const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"];

/// Returns the maximum number of threads of a launch.
fn threads_of(file: &str) -> u32 {
    match file {
        "attention" | "plain_attention" | "linear" => 128,
        _ => 256,
    }
}

/// The assembler's report on one kernel.
#[derive(Default)]
struct Report {
    name: String,
    registers: u32,
    shared: u32,
    spills: u32,
}

/// Parses the number before `unit` in a line of the report.
fn number(line: &str, unit: &str) -> Option<u32> {
    let before = line[..line.find(unit)?].trim_end();
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn reports(log: &str) -> Vec<Report> {
    let mut all: Vec<Report> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(Report { name, ..Report::default() });
        } else if let Some(report) = all.last_mut() {
            report.spills = report.spills.max(number(line, " bytes spill stores").unwrap_or(0));
            report.registers = report.registers.max(number(line, " registers").unwrap_or(0));
            report.shared = report.shared.max(number(line, " bytes smem").unwrap_or(0));
        }
    }
    all
}

/// Checks that a compilation ends soon after its time is over. Returns the problem.
fn late(nvrtc: &Nvrtc) -> Option<String> {
    let (file, text) = sources::FILES.iter().max_by_key(|(_, text)| text.len())?;
    let timed = |until| {
        let began = Instant::now();
        (nvrtc.compile(file, text, ARCHITECTURES[0], until).map(drop), began.elapsed())
    };
    let (_, complete) = timed(None);
    let (ended, early) = timed(Some(Instant::now() + complete / 8));
    let is_late = ended == Err(Error::Late { file: (*file).to_owned() });
    (!is_late || early < complete / 8 || early > complete).then(|| {
        format!(
            "{file} with an eighth of its time: {ended:?} after {early:?}, expected less than {complete:?}"
        )
    })
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let folders: Vec<_> = words.next().into_iter().map(Into::into).collect();
    let given: Vec<String> = words.collect();
    let known: Vec<&str> = ARCHITECTURES
        .into_iter()
        .filter(|arch| given.is_empty() || given.iter().any(|own| own == arch))
        .collect();
    if known.len() < given.len() {
        eprintln!("unknown architectures among {given:?}; expected some of {ARCHITECTURES:?}");
        return ExitCode::FAILURE;
    }
    let nvrtc = match Nvrtc::load(&folders, None) {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{nvrtc:?}");
    let jobs: Vec<(&str, &str, &str)> = known
        .iter()
        .flat_map(|arch| sources::FILES.iter().map(|(file, text)| (*arch, *file, *text)))
        .collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((arch, file, text)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let compiled = nvrtc.compile(file, text, arch, None).map(|compiled| compiled.log);
                    done.lock().unwrap_or_else(PoisonError::into_inner).insert((*arch, *file), compiled);
                }
            });
        }
    });
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut problems = Vec::new();
    for arch in known {
        let (mut count, mut most) = (0, Report::default());
        for (file, _) in sources::FILES {
            let log = match &done[&(arch, *file)] {
                Ok(log) => log,
                Err(error) => {
                    problems.push(error.to_string());
                    continue;
                }
            };
            let reports = reports(log);
            // Kernels made by macros are reported in several lines.
            if reports.is_empty() {
                problems.push(format!("{file} for {arch}: no report in\n{log}"));
            }
            count += reports.len();
            for report in reports {
                let Report { name, registers, shared, spills } = &report;
                let threads = threads_of(file);
                if registers * threads > 65_536 || *registers == 0 || *shared > 48 << 10 || *spills > 0 {
                    problems.push(format!(
                        "{file}/{name} for {arch}: {registers} registers × {threads} threads (of 65,536), {shared} bytes of \
                         static shared memory (of 49,152), {spills} bytes spilled (of 0)"
                    ));
                }
                if report.registers > most.registers {
                    most = report;
                }
            }
        }
        println!("{arch}: {count} kernels, at most {} registers ({})", most.registers, most.name);
    }
    problems.extend(late(&nvrtc));
    for problem in &problems {
        eprintln!("{problem}");
    }
    if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
