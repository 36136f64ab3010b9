//! Writes the demo's dataset: `cargo run -p omnigrpo-demo --example task -- DIR [SEED [SFT TRAIN EVAL]]`.

use std::path::Path;

use omnigrpo_demo::{Sizes, generate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("expected a directory to write to")?;
    let seed = args.next().map_or(Ok(1), |text| text.parse())?;
    let numbers = args.map(|text| text.parse()).collect::<Result<Vec<usize>, _>>()?;
    let sizes = match numbers[..] {
        [] => Sizes::default(),
        [sft, train, eval] => Sizes { sft, train, eval },
        _ => return Err("expected three sizes: rows for sft, train and eval".into()),
    };
    generate(Path::new(&dir), seed, sizes)?;
    Ok(())
}
