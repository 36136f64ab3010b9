//! Decoding steps: kernels that start early, and queries and keys that attention itself normalises and rotates.

use omnigrpo_gpu::{Arena, DecodingSize, DrawSize, Draws, Pack, Turn};

use super::*;

const HEADS: Heads = Heads { q: 4, kv: 2, d: 64 };
/// Rows of the prompt, and tokens of each of its completions: several parts of each.
const PROMPT: usize = 150;
const LENGTHS: [usize; 3] = [5, 130, 64];

/// A weight with its codes, if it has any.
struct Matrix {
    dense: Array,
    codes: Option<Codes>,
    n: usize,
}

impl Matrix {
    fn new(gpu: &Gpu, bits: Option<QuantBits>, [n, k]: [usize; 2], seed: u64) -> Self {
        let values: Vec<f32> = noise(n * k, seed).iter().map(|x| x / 8.0).collect();
        let codes = bits.map(|bits| {
            let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&values[i * k..(i + 1) * k]);
            let (codes, scales) = QuantMatrix::from_rows(bits, n, k, row).unwrap().by_rows();
            let scales: Vec<_> = scales.iter().map(|scale| [scale.min, scale.step]).collect();
            Codes::new(gpu, bits, [n, k], &codes, &scales)
        });
        Self { dense: gpu.cast(&gpu.upload(&values), Dtype::Bf16), codes, n }
    }

    fn layer<'a>(&'a self, bias: Option<&'a Array>) -> Affine<'a> {
        let weight = self.codes.as_ref().map_or(Weight::Dense(&self.dense), Weight::Codes);
        Affine { weight, bias, n: self.n }
    }
}

/// Runs a step of a decoder of one layer, from the last tokens to the drawn ones, with plain launches and as a graph. Returns its
/// numbers of kernels and of those that started early.
fn step(bits: Option<QuantBits>, sampling: &Sampling, schedule: u64) -> [u64; 2] {
    let gpu = gpu(schedule);
    let Heads { q, kv, d } = HEADS;
    let (h, inner, vocab, width, packed) = (128, 4290, 300, 2 * kv * d, (q + 2 * kv) * d);
    let of = |n, k, seed| Matrix::new(&gpu, bits, [n, k], seed);
    let (embedding, [of_q, of_k, of_v]) =
        (of(vocab, h, 1), [(q * d, 2), (kv * d, 3), (kv * d, 4)].map(|(n, s)| of(n, h, s)));
    let (o, gate, up, down) = (of(h, q * d, 5), of(inner, h, 6), of(inner, h, 7), of(h, inner, 8));
    let vector = |n: usize, seed| numbers(&gpu, n, Dtype::Bf16, seed).0;
    let (bias, norms, qk) =
        (vector(q * d, 9), [vector(h, 10), vector(h, 11)], [vector(d, 12), vector(d, 13)]);
    let prompt = numbers(&gpu, PROMPT * width, Dtype::Bf16, 14).0;
    let pages: Vec<Vec<Array>> = LENGTHS
        .iter()
        .map(|len| (0..len.div_ceil(PAGE)).map(|page| vector(PAGE * width, 20 + page as u64)).collect())
        .collect();
    let completions = pages.iter().map(|pages| pages.iter().collect()).zip(LENGTHS).collect();
    let cached = [CachedGroup { prompt: &prompt, prompt_rows: PROMPT, completions }];
    let rows = gpu.batch_of(LENGTHS.len());
    let from: Vec<Row> = (0..LENGTHS.len())
        .map(|row| Row { uniform: 0.3 * row as f64, seen: vec![7, 9], forbids: row == 1 })
        .collect();
    let mut pack = Pack::default();
    let size = DecodingSize::of(&cached, HEADS).rounded(rows);
    let tables = Decoding::pack(&mut pack, &cached, HEADS, size);
    let draw_size = DrawSize::of(&from, sampling).rounded(rows);
    let draws = Draws::pack(&mut pack, &from, draw_size, sampling, &[5, 17], vocab);
    let ids = pack.add(&[3u32, 299, 3, 0, 0, 0, 0, 0][..rows]);
    let whole = pack.upload(&gpu);
    let ids = Array::part(&whole, ids, rows);
    let (tables, draws) = (Decoding::over(&whole, tables, size), Draws::over(&whole, draws, draw_size));
    let [cos, sin] = [30, 31].map(|seed| gpu.upload(&noise(rows * d / 2, seed)));
    let mut out = gpu.drawn(rows);
    let run = |out: &mut Array| {
        let x = gpu.weight_rows(embedding.layer(None).weight, h, Some(&ids), rows, Dtype::F32);
        let normed = gpu.rms(&x, &norms[0], 1e-6, Dtype::Bf16).0;
        let mut qkv = gpu.alloc(rows * packed, Dtype::Bf16);
        let layers = [of_q.layer(Some(&bias)), of_k.layer(None), of_v.layer(None)];
        gpu.linear_rows(&mut qkv, [0, packed], &normed, &layers, h, Onto::Nothing);
        let turn = Turn { waves: Some([&cos, &sin]), norms: Some((qk.each_ref(), [1e-6, 1.0])) };
        let attended = gpu.attend_cached(&qkv, &tables, 0, HEADS, turn);
        let mut y = gpu.alloc(rows * h, Dtype::F32);
        gpu.linear_rows(&mut y, [0, h], &attended, &[o.layer(None)], q * d, Onto::Residual(&x));
        let normed = gpu.rms(&y, &norms[1], 1e-6, Dtype::Bf16).0;
        let active = gpu.swiglu_rows(&normed, [gate.layer(None), up.layer(None)], [rows, h], Dtype::Bf16);
        let mut z = gpu.alloc(rows * h, Dtype::F32);
        gpu.linear_rows(&mut z, [0, h], &active, &[down.layer(None)], inner, Onto::Residual(&y));
        let normed = gpu.rms(&z, &norms[1], 1e-6, Dtype::Bf16).0;
        let mut logits = gpu.alloc(rows * vocab, Dtype::F32);
        gpu.linear_rows(&mut logits, [0, vocab], &normed, &[embedding.layer(None)], h, Onto::Nothing);
        gpu.draw(out, 0, &mut logits, vocab, sampling, &draws);
    };
    let arena = Arena::new(&gpu);
    gpu.within(&arena, || run(&mut out));
    let plain = gpu.read_drawn(&out);
    gpu.check().unwrap();
    assert!(plain.iter().all(|one| one.logprob.is_finite() && (one.id as usize) < vocab), "{plain:?}");
    let counts = || [gpu.traffic().map_or(0, |[_, _, kernels]| kernels), gpu.early_launches().unwrap_or(0)];
    let graph = gpu.capture(&arena, || run(&mut out)).unwrap();
    let before = counts();
    gpu.replay(&graph, &[&out]);
    let after = counts();
    let replayed = gpu.read_drawn(&out);
    // `check` names the kernel that did not wait, so it comes before the comparison.
    gpu.check().unwrap();
    assert_eq!(replayed, plain, "{bits:?}, {sampling:?}");
    [0, 1].map(|i| after[i] - before[i])
}

/// On a card with enough shared memory, a launch takes 128 rows. The bits are those of launches of 64.
#[test]
fn launches_of_more_rows_have_the_same_bits() {
    let [t, n, k] = [100, 70, 328];
    let run = |card: [usize; 3], schedule: u64| {
        let gpu = gpu(schedule);
        gpu.choose_as_on(Some(card));
        let x = numbers(&gpu, t * k, Dtype::Bf16, 1).0;
        let weights = [2, 3].map(|seed| Matrix::new(&gpu, None, [n, k], seed));
        let layers = weights.each_ref().map(|weight| weight.layer(None));
        let mut y = gpu.alloc(t * 2 * n, Dtype::F32);
        gpu.linear_rows(&mut y, [0, 2 * n], &x, &layers, k, Onto::Nothing);
        // Sums of one part, as wide weights have.
        let short = gpu.swiglu_rows(&numbers(&gpu, t * 120, Dtype::Bf16, 4).0, layers, [t, 120], Dtype::Bf16);
        gpu.choose_as_on(None);
        gpu.check().unwrap();
        let launches = gpu.traffic().map_or(0, |[_, _, kernels]| kernels);
        let bits: Vec<u32> = [y, short].iter().flat_map(Array::to_vec).map(f32::to_bits).collect();
        (bits, launches)
    };
    let (narrow, more) = run([132, 99 << 10, 100 << 10], 0);
    for schedule in SCHEDULES {
        let (wide, fewer) = run([132, 227 << 10, 228 << 10], schedule);
        assert!(wide == narrow, "schedule {schedule}");
        assert!(fewer + 2 == more || more == 0, "{fewer} and {more} launches");
    }
}

/// All kernels of a step but the first start early, whatever the form of the weights and of the draw. What they compute is the
/// same. With the checks of tools/gpu/ptx, an access to what a kernel before may still write or read fails before the wait.
#[test]
fn kernels_of_a_step_wait_for_those_before_them() {
    let cuts = Sampling { top_k: 40, top_p: 0.9, min_p: 0.01, repetition_penalty: 1.2, ..PLAIN };
    for (bits, sampling, schedule) in
        [(None, &cuts, 1), (Some(QuantBits::Eight), &PLAIN, 2), (Some(QuantBits::Four), &PLAIN, 1)]
    {
        let [kernels, early] = step(bits, sampling, schedule);
        assert!(kernels == 0 || early + 1 == kernels, "{bits:?}: {early} of {kernels} kernels start early");
    }
}

/// Attention over a cache normalises and rotates queries and the new key as kernels of their own do, to the bit, and appends the
/// same key: whole heads and a part of their columns, several tiles of query heads, a shared prompt and none.
#[test]
fn queries_and_keys_are_turned_as_by_their_own_kernels() {
    let run = |heads: Heads, half: usize, normed: Option<f32>, prompt_rows: usize, schedule: u64| {
        let gpu = gpu(schedule);
        let Heads { q, kv, d } = heads;
        let (rows, width, packed) = (LENGTHS.len(), 2 * kv * d, (q + 2 * kv) * d);
        let array = |n: usize, seed| numbers(&gpu, n, Dtype::Bf16, seed).0;
        let (qkv, prompt, weights) =
            (array(rows * packed, 1), array(prompt_rows * width, 2), [array(d, 3), array(d, 4)]);
        let [cos, sin] = [5, 6].map(|seed| gpu.upload(&noise(rows * half, seed)));
        let attend = |qkv: &Array, turn: Turn| {
            let pages: Vec<Vec<Array>> = LENGTHS
                .iter()
                .map(|len| (0..len.div_ceil(PAGE)).map(|page| array(PAGE * width, 7 + page as u64)).collect())
                .collect();
            let completions = pages.iter().map(|pages| pages.iter().collect()).zip(LENGTHS).collect();
            let cached = [CachedGroup { prompt: &prompt, prompt_rows, completions }];
            let out = gpu.attend_cached(qkv, &Decoding::new(&gpu, &cached, heads), 0, heads, turn);
            let arrays = std::iter::once(&out).chain(pages.iter().flatten());
            arrays.flat_map(Array::to_vec).map(f32::to_bits).collect::<Vec<_>>()
        };
        let norms = normed.map(|shift| (weights.each_ref(), [1e-5, shift]));
        let joined = attend(&qkv, Turn { waves: Some([&cos, &sin]), norms });
        let mut own = gpu.cast(&qkv, Dtype::Bf16);
        for (weight, first, count) in [(&weights[0], 0, q), (&weights[1], q, kv)] {
            if let Some(shift) = normed {
                let weight = gpu.shifted(weight, shift);
                let (turned, _) = gpu.rms(&qkv, &weight, 1e-5, Dtype::Bf16);
                let place = Place::new(first * d, packed);
                gpu.copy_rows(&mut own, place, &turned, place, [rows, count * d]);
            }
        }
        gpu.rotate(&mut own, [rows, packed], &cos, &sin, [q + kv, d], false);
        let apart = attend(&own, Turn::default());
        gpu.check().unwrap();
        assert!(
            joined == apart,
            "{heads:?}, {half} pairs, norms {normed:?}, {prompt_rows} rows, schedule {schedule}"
        );
        assert!(attend(&qkv, Turn::default()) != apart, "turning changes something");
    };
    for (schedule, heads, half, normed, prompt_rows) in [
        (0, HEADS, 32, None, 70),
        (1, HEADS, 32, Some(0.0), 150),
        (2, HEADS, 7, Some(1.0), 0),
        (1, Heads { q: 40, kv: 2, d: 72 }, 36, Some(0.0), 130),
        (2, Heads { q: 3, kv: 3, d: 72 }, 10, None, 1),
    ] {
        run(heads, half, normed, prompt_rows, schedule);
    }
}
