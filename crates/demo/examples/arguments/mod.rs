//! Arguments of the examples that write a dataset: `DIR [SEED [SFT TRAIN EVAL]]`.

use std::error::Error;
use std::path::PathBuf;

use omnigrpo_demo::Sizes;

pub fn read(usual: Sizes) -> Result<(PathBuf, u64, Sizes), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("expected a directory to write to")?;
    let seed = args.next().map_or(Ok(1), |text| text.parse())?;
    let numbers = args.map(|text| text.parse()).collect::<Result<Vec<usize>, _>>()?;
    let sizes = match numbers[..] {
        [] => usual,
        [sft, train, eval] => Sizes { sft, train, eval },
        _ => return Err("expected three sizes: rows for sft, train and eval".into()),
    };
    Ok((dir.into(), seed, sizes))
}
