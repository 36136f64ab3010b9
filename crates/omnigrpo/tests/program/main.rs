//! Tests of the program from its command line. They are one test program, so that those that wait run beside those that compute.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod bad_input;
mod bad_media;
mod cli;
mod free;
mod humanomni;
mod init;
mod lora;
mod published;
mod run_contract;
mod scorers;
mod serve;
mod strangers;
mod support;
mod translate;
mod trouble;
mod turns;
mod verbs;
mod vivqa_x;
