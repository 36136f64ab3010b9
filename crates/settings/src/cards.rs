//! Rates of GPUs, for the times that `plan` predicts without one.

use omnigrpo_train::CardRates;

use crate::problem::Problem;

/// A GPU with its published rates.
#[derive(Clone, Copy, Debug)]
pub struct KnownCard {
    /// Name, as `gpu_rates` takes it.
    pub name: &'static str,
    /// Size of its memory, in GB.
    memory: f64,
    /// Products of bf16 with sums in f32, without sparsity, in TFLOP/s.
    products: f64,
    /// Rate of its memory, in GB/s.
    moves: f64,
}

/// GPUs by memory, from the data sheets of their maker. Of those with the same memory, the first is assumed where none is named.
pub const CARDS: [KnownCard; 12] = [
    card("rtx-4080", 16.0, 97.0, 717.0),
    card("rtx-4090", 24.0, 165.0, 1008.0),
    card("rtx-3090", 24.0, 71.0, 936.0),
    card("l4", 24.0, 121.0, 300.0),
    card("rtx-5090", 32.0, 209.0, 1792.0),
    card("a100-40gb", 40.0, 312.0, 1555.0),
    card("a6000", 48.0, 155.0, 768.0),
    card("l40s", 48.0, 362.0, 864.0),
    card("a100-80gb", 80.0, 312.0, 2039.0),
    card("h100", 80.0, 989.0, 3350.0),
    card("h200", 141.0, 989.0, 4800.0),
    card("b200", 180.0, 2250.0, 8000.0),
];

const fn card(name: &'static str, memory: f64, products: f64, moves: f64) -> KnownCard {
    KnownCard { name, memory, products, moves }
}

impl KnownCard {
    /// Returns the card that is assumed for an amount of memory in bytes: the smallest one that has it.
    pub fn with_memory(bytes: u64) -> Self {
        // A card reports up to a tenth more or less than its name says.
        let fits = |card: &&Self| 1.1 * card.memory * 1e9 >= bytes as f64;
        *CARDS.iter().find(fits).unwrap_or(&CARDS[CARDS.len() - 1])
    }

    /// Returns its rates.
    pub fn rates(&self) -> CardRates {
        CardRates { flops: self.products * 1e12, bytes: self.moves * 1e9 }
    }
}

/// Reads `gpu_rates`: the name of a card, or TFLOP/s and GB/s with a comma between them.
///
/// # Errors
/// Returns an error with the names of the cards.
pub fn rates_of(text: &str) -> Result<CardRates, Problem> {
    if let Some(card) = CARDS.iter().find(|card| card.name == text.trim().to_lowercase()) {
        return Ok(card.rates());
    }
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|own| *own > 0.0 && *own < 1e9);
    let both = text.split_once(',').and_then(|(flops, bytes)| number(flops).zip(number(bytes)));
    both.map(|(flops, bytes)| CardRates { flops: flops * 1e12, bytes: bytes * 1e9 }).ok_or_else(|| {
        let names: Vec<String> = CARDS.iter().map(|card| format!("`{}`", card.name)).collect();
        Problem::usage("these are no rates of a GPU").at("--gpu_rates").got(format!("`{text}`")).expected(
            format!(
                "{}, or TFLOP/s of bf16 products and GB/s of memory, such as `165,1008`",
                names.join(", ")
            ),
        )
    })
}
