//! Metrics and console.

use super::*;
use crate::names::{Tracker, words};
use crate::values::Field as _;
use Kind::{Bool, Choices, Text, Texts, Words};
use std::net::{IpAddr, Ipv4Addr};
use verb::Verb::{Serve, Watch};

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row(
        "logging_steps",
        int(1, COUNT),
        Place {
            field: "run.records.logging_steps",
            set: |s, v| {
                s.run.records.logging_steps = take(v)?;
                s.run.records.grpo_logging_steps = s.run.records.logging_steps;
                Ok(())
            },
            get: |s| s.run.records.logging_steps.value(),
        },
        LOOP,
    )
    .help("Steps averaged in one line of the console; metrics.jsonl has every step.")
    .free(LOOP)
    .per_rank(),
    row("grpo_logging_steps", int(1, COUNT), at!(run.records.grpo_logging_steps), &[Train, Demo])
        .help("Steps averaged in a line of the `grpo/…` metrics.")
        .unset("`logging_steps`")
        .free(LOOP)
        .per_rank(),
    row("report_to", Choices(words::<Tracker>), at!(log.report_to), LOOP)
        .help(
            "Trackers that get the metrics, as means over `logging_steps`. `metrics.jsonl` in the run directory \
             is always written. A tracker that fails or falls behind is dropped with a warning.",
        )
        .free(LOOP)
        .per_rank(),
    row("prometheus_port", int(0, 65_535), at!(log.prometheus_port), LOOP)
        .help("Port on `host` where Prometheus finds `/metrics`; 0 takes a free one.")
        .free(LOOP)
        .idle(|s, _| (!s.reports_to(Tracker::Prometheus)).then_some("`report_to` has no prometheus"))
        .per_rank(),
    row("dashboard", Bool, at!(log.dashboard), LOOP)
        .help(
            "Show the run as a page on this machine while it trains; the address is printed. `watch` shows it \
             afterwards.",
        )
        .free(LOOP)
        .per_rank(),
    row("dashboard_port", int(0, 65_535), at!(log.dashboard_port), &[Train, Sft, Demo, Watch])
        .help("Port of the page on `host`; 0 takes a free one.")
        .free(LOOP)
        .idle(|s, verb| match verb {
            Watch => s.log.tui.then_some("`tui` shows no page"),
            _ => (!s.log.dashboard).then_some("`dashboard` is off, so there is no page"),
        })
        .per_rank(),
    row(
        "host",
        Text,
        Place {
            field: "network.host",
            set: |s, v| {
                s.network.host = host_of(&take::<String>(v)?)?;
                Ok(())
            },
            get: |s| Some(Value::Text(s.network.host.to_string())),
        },
        SERVES,
    )
    .help(
        "Address at which the page, Prometheus and `serve` listen: 127.0.0.1 for this machine alone, 0.0.0.0 for all machines that \
         reach it. Beyond this machine, `serve` and Prometheus need the key OMNIGRPO_API_KEY, of at least 16 characters; the page's address has a token.",
    )
    .free(LOOP)
    .idle(serves_nothing)
    .per_rank(),
    row("allowed_hosts", Words, at!(network.allowed_hosts), SERVES)
        .help(
            "Names by which clients may call the page, Prometheus and `serve`, such as `node7,gpu.example.org`. Addresses of this \
             machine are always allowed. Others get status 421, so that no web page reaches the server under a name of its own.",
        )
        .unset("addresses alone")
        .free(LOOP)
        .idle(serves_nothing)
        .per_rank(),
    row("tui", Bool, at!(log.tui), &[Watch])
        .help(
            "Show the runs in the terminal instead of a page; `?` lists the keys. In a pipe, print a line per step \
             until the runs have ended.",
        ),
    row("notify", Texts, at!(log.notify), &[Train, Sft])
        .help(
            "Programs (`cmd:PROGRAM ARGUMENTS`) and webhooks (`https://…`) that get a message when the run ends, is \
             stopped or fails, and when a training problem begins: a JSON object on standard input, or as a POST \
             (docs/runs.md). A delivery that fails is a warning.",
        )
        .unset("no messages")
        .free(LOOP)
        .per_rank(),
    row("profile", Bool, at!(log.profile), &[Train, Sft, Generate, Demo])
        .help(
            "Print at the end how the time was spent, by phase and kind of work, with operations and bytes per \
             second.",
        )
        .free(Verb::ALL)
        .per_rank(),
    row("gpu", Bool, at!(log.gpu), &[Doctor]).help(
        "Check every GPU for about ten seconds: versions of the libraries, the card's health, products compared with the CPU, rates \
         of copies and products, and a kernel of each file that is compiled in this time.",
    ),
    row("run_name", Text, at!(run.card.run_name), LOOP)
        .help("Name of the run in logs, trackers and the model card.")
        .unset("name of the run directory")
        .free(LOOP)
        .per_rank(),
    row("log_completions", Bool, at!(run.records.log_completions), &[Train, Demo])
        .help("Print a few completions with their rewards with each line of the console.")
        .free(LOOP)
        .per_rank(),
    row("log_token_stats", Bool, at!(algorithm.token_stats), &[Train, Demo])
        .help(
            "Write the numbers of each token (log-probabilities, entropy) to `tokens/` in the run directory, \
             for the colours of `watch`: some 40 bytes per token, without another pass through the model.",
        )
        .free(LOOP),
];

/// Commands that have a server.
const SERVES: &[Verb] = &[Train, Sft, Demo, Watch, Serve];

/// Returns the reason why a command has no server.
fn serves_nothing(s: &Settings, verb: Verb) -> Option<&'static str> {
    match verb {
        Serve => None,
        Watch => s.log.tui.then_some("`tui` shows no page"),
        _ => (!s.log.dashboard && !s.reports_to(Tracker::Prometheus))
            .then_some("`dashboard` is off and `report_to` has no prometheus, so there is no server"),
    }
}

/// Reads the address of a server.
fn host_of(text: &str) -> Result<IpAddr, Problem> {
    match text.trim() {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        text => text.trim_matches(['[', ']']).parse().map_err(|_| {
            Problem::usage("this is no address of a machine")
                .at("--host")
                .got(format!("`{text}`"))
                .expected("an address at which to listen, such as `127.0.0.1`, `0.0.0.0` or `::`")
                .help("`--allowed_hosts` takes names by which clients call the server")
        }),
    }
}
