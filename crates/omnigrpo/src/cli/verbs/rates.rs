//! Measurement of products with every kind of weights on this machine, for `doctor`.

use std::time::{Duration, Instant};

use half::bf16;
use omnigrpo_kernels::linear::{self, Layer};
use omnigrpo_kernels::paths::{Cpu, Path};
use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};
use omnigrpo_kernels::{Arithmetic, Mat, MatMut, Weight};

/// Sizes of the products: rows in training, rows in decoding, inputs, outputs.
const ROWS: usize = 256;
const FEW_ROWS: usize = 8;
const INPUTS: usize = 1024;
const OUTPUTS: usize = 1024;
/// Number of rounds of the measurement. Each round measures all kinds of weights, since the speed of a shared machine varies.
const TURNS: usize = 6;
const TURN: Duration = Duration::from_millis(20);
/// Factor by which another path must be faster before `doctor` reports it. Rates of shared machines vary by a fifth.
const DOUBT: f64 = 1.25;

/// Measures every kind of weights for about a second, with this arithmetic as the one in use. Returns pairs of name and text, one per line.
// One table: the measurement of each kind of weights, then its line.
pub fn lines(arithmetic: Arithmetic) -> Vec<(String, String)> {
    let noise = |len: usize| (0..len).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect::<Vec<f32>>();
    let (x, wide) = (noise(ROWS * INPUTS), noise(OUTPUTS * INPUTS));
    let narrow: Vec<bf16> = wide.iter().map(|&w| bf16::from_f32(w)).collect();
    let few = |bits| {
        let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&wide[i * INPUTS..(i + 1) * INPUTS]);
        QuantMatrix::from_rows(bits, OUTPUTS, INPUTS, row)
    };
    let few = [few(QuantBits::Eight), few(QuantBits::Four)];
    let mut y = vec![0.0; ROWS * OUTPUTS];
    let mut turn = |w: Weight, rows: usize| {
        let (layers, start) = ([Layer::new(w)], Instant::now());
        let (mut best, kernel) =
            (f64::INFINITY, if rows == ROWS { linear::forward_into } else { linear::forward_rows_into });
        while start.elapsed() < TURN {
            let (one, x) = (Instant::now(), Mat::new(&x[..rows * INPUTS], rows, INPUTS));
            kernel(x, &layers, false, MatMut::new(&mut y[..rows * OUTPUTS], rows, OUTPUTS));
            best = best.min(one.elapsed().as_secs_f64());
        }
        (2 * rows * INPUTS * OUTPUTS) as f64 / best / 1e9
    };
    let used = arithmetic.path();
    let (mut f32_rate, mut bf16_rates, mut few_rates) = (0.0f64, [None; Path::ALL.len()], [0.0f64; 2]);
    for _ in 0..TURNS {
        f32_rate = f32_rate.max(turn(Weight::f32(&wide, OUTPUTS, INPUTS), ROWS));
        for (path, rate) in Path::ALL.into_iter().zip(&mut bf16_rates) {
            let given = Arithmetic { bf16_products: Some(path), ..arithmetic };
            if given.check().is_ok() {
                let best: f64 = rate.unwrap_or(0.0);
                *rate = Some(best.max(turn(Weight::bf16(&narrow, OUTPUTS, INPUTS).with(given), ROWS)));
            }
        }
        for (few, rate) in few.iter().flatten().zip(&mut few_rates) {
            *rate = rate.max(turn(Weight::from(few.rows()).with(arithmetic), FEW_ROWS));
        }
    }
    let cpu = Cpu::here().map_or("unknown".to_owned(), |cpu| {
        let row = cpu
            .row()
            .map_or("not in the table of bf16 products, so they widen without tiles", |row| row.name);
        format!("{cpu}: {row}")
    });
    let mut out = vec![("CPU model".to_owned(), cpu)];
    let mut line = |name: &str, text: String| out.push((format!("  {name}"), text));
    line("float32", format!("{f32_rate:.0} GFLOP/s"));
    for (path, rate) in Path::ALL.into_iter().zip(bf16_rates) {
        let is_used = if path == used { ", used" } else { "" };
        let text = rate.map_or("does not work here".to_owned(), |rate| format!("{rate:.0} GFLOP/s{is_used}"));
        line(&format!("bfloat16 {}", path.name()), text);
    }
    let inputs = if arithmetic.rounds_inputs() { "bytes" } else { "float32" };
    for (bits, rate) in ["8 bits", "4 bits"].iter().zip(few_rates) {
        line(bits, format!("{rate:.0} GFLOP/s with {FEW_ROWS} rows, activations in {inputs}"));
    }
    let rates = Path::ALL.into_iter().zip(bf16_rates).filter_map(|(path, rate)| Some((path, rate?)));
    if let Some(doubt) = doubt(used, &rates.collect::<Vec<_>>()) {
        line("doubt", doubt);
    }
    out
}

/// Returns a remark if another path than the one in use is clearly faster.
fn doubt(used: Path, rates: &[(Path, f64)]) -> Option<String> {
    let own = rates.iter().find(|(path, _)| *path == used)?.1;
    let (path, rate) = rates.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1))?;
    (rate > DOUBT * own).then(|| {
        format!(
            "bfloat16 {} reached {rate:.0} GFLOP/s here and {}, which is used, {own:.0}: the choice seems wrong for this machine; \
             `--bf16_products {}` takes the other",
            path.name(),
            used.name(),
            path.name()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_takes_the_slower_path_is_doubted() {
        let rates = [(Path::Widened, 215.0), (Path::Dot, 137.0)];
        let told = doubt(Path::Dot, &rates).unwrap_or_default();
        assert!(
            told.contains("215") && told.contains("137") && told.contains("`--bf16_products widened`"),
            "{told}"
        );
        assert_eq!(doubt(Path::Widened, &rates), None);
        assert_eq!(doubt(Path::Widened, &[(Path::Widened, 200.0), (Path::Dot, 240.0)]), None);
        assert_eq!(doubt(Path::Amx, &rates), None);
    }
}
