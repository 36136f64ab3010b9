//! Serves run directories: `cargo run -p omnigrpo-watch --example page -- runs/demo`.

#![allow(clippy::print_stdout)]

use std::path::PathBuf;

fn main() -> Result<(), omnigrpo_watch::Error> {
    let directories: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let server = omnigrpo_watch::Server::start(&directories, &omnigrpo_watch::Place::local(0))?;
    println!("{}", server.url());
    loop {
        std::thread::park();
    }
}
