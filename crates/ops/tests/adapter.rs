//! Adapters in every linear op: values, central differences, dropout under recomputation, frozen weights.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use omnigrpo_ops::{
    Adapter, Dropout, Linear, MatmulMode, PackedLinear, Param, Part, QuantBits, QuantMatrix, RopeTable,
    Segments, rows_from_vec, to_vec,
};

const RANK: usize = 3;
const ROWS: usize = 5;
const K: usize = 64;

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

fn param(name: &str, shape: &[usize], seed: u32) -> Arc<Param> {
    let value = Tensor::from_vec(noise(shape.iter().product(), seed), shape, &Device::Cpu).unwrap();
    Arc::new(Param::new(name, Part::Llm, value).unwrap())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Base {
    F32,
    Bf16,
    Quantised(QuantBits),
}

const BASES: [Base; 4] =
    [Base::F32, Base::Bf16, Base::Quantised(QuantBits::Eight), Base::Quantised(QuantBits::Four)];

struct Layers {
    layers: Vec<Linear>,
    dropout: Arc<Dropout>,
}

/// A query, key and value layer of 8, 4 and 4 outputs; the first and last carry adapters.
fn layers(base: Base, rate: f32, adapted: bool) -> Layers {
    let dropout = Arc::new(Dropout::default());
    let layers = [("q", 8, true), ("k", 4, false), ("v", 4, true)].map(|(name, n, with)| {
        let seed = n as u32 + u32::from(name.as_bytes()[0]);
        let dense = noise(n * K, seed);
        let tensor = Tensor::from_vec(dense.clone(), (n, K), &Device::Cpu).unwrap();
        let weight = match base {
            Base::F32 => Param::new(name, Part::Llm, tensor).unwrap(),
            Base::Bf16 => Param::new(name, Part::Llm, tensor.to_dtype(DType::BF16).unwrap()).unwrap(),
            Base::Quantised(bits) => {
                let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&dense[i * K..(i + 1) * K]);
                let matrix = QuantMatrix::from_rows(bits, n, K, row).unwrap();
                Param::quantised(name, Part::Llm, &[n, K], matrix).unwrap()
            }
        };
        let layer = Linear::new(Arc::new(weight), Some(param("bias", &[n], seed + 1))).unwrap();
        if with && adapted {
            let (a, b) =
                (param(&format!("{name}.a"), &[RANK, K], seed + 2), param("b", &[n, RANK], seed + 3));
            a.set_trainable(true);
            b.set_trainable(true);
            let adapter = Adapter::new(a, b, 0.7, rate, Arc::clone(&dropout)).unwrap();
            layer.weight().attach(Arc::new(adapter)).unwrap();
        }
        layer
    });
    Layers { layers: layers.into(), dropout }
}

fn table() -> Arc<RopeTable> {
    Arc::new(RopeTable::from_angles(ROWS, 2, |row, angles| angles.copy_from_slice(&[row as f32, 0.3])))
}

/// With and without a rotation behind the layers.
#[derive(Clone, Copy, Debug)]
enum Op {
    Packed,
    Rope,
}

fn run(op: Op, x: &Tensor, l: &Layers, mode: MatmulMode) -> candle_core::Result<Tensor> {
    let layers: Vec<&Linear> = l.layers.iter().collect();
    let packed = PackedLinear::new(&layers, mode);
    x.apply_op1(match op {
        Op::Packed => packed,
        Op::Rope => packed.rotated(&table(), 3),
    })
}

fn input() -> Tensor {
    rows_from_vec(noise(ROWS * K, 1), ROWS, K).unwrap()
}

/// Σ c·y in f64.
fn loss(op: Op, x: &Tensor, l: &Layers) -> f64 {
    let y = to_vec(&run(op, x, l, MatmulMode::Gemm).unwrap()).unwrap();
    y.iter().zip(noise(y.len(), 50)).map(|(y, c)| f64::from(*y) * f64::from(c)).sum()
}

fn change(p: &Param, at: usize, by: f32) {
    p.update_f32(|data| data[at] += by).unwrap();
}

/// The loss is linear in x, in A and in B, so central differences with a step of 1 are exact up to rounding: values of
/// about 30 with 64 terms, differences of two of them, so 1e-4 leaves a margin of ten.
#[test]
fn gradients_equal_central_differences() {
    for base in BASES {
        for op in [Op::Packed, Op::Rope] {
            for rate in [0.0, 0.4] {
                let l = layers(base, rate, true);
                if rate > 0.0 {
                    l.dropout.enter(9, Some([3u64, 1, 4, 1, 5].into()));
                }
                let x = Var::from_tensor(&input()).unwrap();
                let mut tape = Segments::new(false);
                let y = tape.push(&input(), |x| run(op, x, &l, MatmulMode::Gemm)).unwrap();
                let width = y.dim(1).unwrap();
                let dy = rows_from_vec(noise(ROWS * width, 50), ROWS, width).unwrap();
                let dx = to_vec(&tape.backward(dy).unwrap()).unwrap();
                // Products of a bf16 weight on tiles round the other factor, here inputs and gradients of about 1.
                let rounded = matches!(base, Base::Bf16) && omnigrpo_kernels::has_tiles();
                let near = |got: f32, want: f64, what: &str| {
                    let error = (f64::from(got) - want).abs();
                    let bound = if rounded && what == "dx" { 2e-2 } else { 1e-4 };
                    assert!(error <= bound, "{base:?} {op:?} {rate} {what}: {got} for {want}");
                };
                for at in (0..ROWS * K).step_by(7) {
                    let mut data = to_vec(&x).unwrap();
                    data[at] += 1.0;
                    let up = loss(op, &rows_from_vec(data.clone(), ROWS, K).unwrap(), &l);
                    data[at] -= 2.0;
                    let down = loss(op, &rows_from_vec(data, ROWS, K).unwrap(), &l);
                    near(dx[at], (up - down) / 2.0, "dx");
                }
                for layer in &l.layers {
                    assert!(layer.weight().with_grad(|g| g.is_none()), "a frozen weight has no gradient");
                    let Some(adapter) = layer.weight().adapter() else { continue };
                    for p in [adapter.a(), adapter.b()] {
                        let grad = p.with_grad(|g| g.unwrap().to_vec());
                        for at in (0..p.len()).step_by(5) {
                            change(p, at, 1.0);
                            let up = loss(op, &input(), &l);
                            change(p, at, -2.0);
                            let down = loss(op, &input(), &l);
                            change(p, at, 1.0);
                            near(grad[at], (up - down) / 2.0, p.name());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn values_are_base_plus_the_scaled_product() {
    for base in BASES {
        let (with, without) = (layers(base, 0.0, true), layers(base, 0.0, false));
        let x = input();
        let plain = to_vec(&run(Op::Packed, &x, &without, MatmulMode::Gemm).unwrap()).unwrap();
        for mode in [MatmulMode::Gemm, MatmulMode::Rows] {
            let y = to_vec(&run(Op::Packed, &x, &with, mode).unwrap()).unwrap();
            let x = to_vec(&x).unwrap();
            let mut want = plain.iter().map(|&y| f64::from(y)).collect::<Vec<f64>>();
            let mut col = 0;
            for layer in &with.layers {
                if let Some(adapter) = layer.weight().adapter() {
                    let (a, b) =
                        [adapter.a(), adapter.b()].map(|p| p.with_f32(<[f32]>::to_vec).unwrap()).into();
                    for i in 0..ROWS {
                        for r in 0..RANK {
                            let u: f64 =
                                (0..K).map(|p| f64::from(x[i * K + p]) * f64::from(a[r * K + p])).sum();
                            for j in 0..layer.n() {
                                want[i * 16 + col + j] += 0.7f32 as f64 * u * f64::from(b[j * RANK + r]);
                            }
                        }
                    }
                }
                col += layer.n();
            }
            for (y, want) in y.iter().zip(&want) {
                assert!((f64::from(*y) - want).abs() <= 2e-5, "{base:?} {mode:?}: {y} for {want}");
            }
        }
        // B = 0 leaves the bits of the base; so does a handle without the adapter.
        let bare = Layers {
            layers: with
                .layers
                .iter()
                .map(|l| {
                    Linear::new(Arc::new(l.weight().bare()), Some(Arc::clone(l.bias().unwrap()))).unwrap()
                })
                .collect(),
            dropout: Arc::default(),
        };
        for adapter in with.layers.iter().filter_map(|l| l.weight().adapter()) {
            adapter.b().update_f32(|b| b.fill(0.0)).unwrap();
        }
        for l in [&with, &bare] {
            assert_eq!(
                to_vec(&run(Op::Packed, &x, l, MatmulMode::Gemm).unwrap()).unwrap(),
                plain,
                "{base:?}"
            );
        }
    }
}

/// A residual goes in first and is summed with the rest in f32: the last bits may differ.
#[test]
fn a_residual_is_added() {
    let residual = noise(ROWS * 16, 99);
    for base in BASES {
        let l = layers(base, 0.0, true);
        let layers: Vec<&Linear> = l.layers.iter().collect();
        for mode in [MatmulMode::Gemm, MatmulMode::Rows] {
            let packed = PackedLinear::new(&layers, mode);
            let x = noise(ROWS * K, 1);
            let onto = packed.forward_onto(&residual, &x, ROWS, K).unwrap();
            let alone = packed.forward(&x, ROWS, K).unwrap();
            for ((onto, alone), residual) in onto.iter().zip(&alone).zip(&residual) {
                assert!((onto - alone - residual).abs() <= 2e-5, "{base:?} {mode:?}: {onto}");
            }
            assert!(packed.forward_onto(&residual[1..], &x, ROWS, K).is_err());
        }
    }
}

#[test]
fn recomputation_sees_the_same_mask() {
    let l = layers(Base::F32, 0.5, true);
    l.dropout.enter(4, None);
    let grads = |recompute: bool| {
        let mut tape = Segments::new(recompute);
        let y = tape.push(&input(), |x| run(Op::Rope, x, &l, MatmulMode::Gemm)).unwrap();
        let dx = tape.backward(rows_from_vec(noise(ROWS * 16, 50), ROWS, 16).unwrap()).unwrap();
        let adapter = l.layers[0].weight().adapter().unwrap();
        let da = adapter.a().with_grad(|g| g.unwrap().to_vec());
        adapter.a().clear_grad();
        (to_vec(&y).unwrap(), to_vec(&dx).unwrap(), da)
    };
    assert_eq!(grads(false), grads(true));
    l.dropout.enter(5, None);
    assert_ne!(grads(false).0, {
        l.dropout.enter(6, None);
        grads(false).0
    });
    l.dropout.leave();
    let plain = grads(false);
    assert_eq!(plain, grads(true));
    let none = layers(Base::F32, 0.0, true);
    assert_eq!(plain.0, to_vec(&run(Op::Rope, &input(), &none, MatmulMode::Gemm).unwrap()).unwrap());
}

#[test]
fn merging_gives_the_same_layer() {
    let l = layers(Base::F32, 0.0, true);
    let y = to_vec(&run(Op::Packed, &input(), &l, MatmulMode::Gemm).unwrap()).unwrap();
    let merged = layers(Base::F32, 0.0, false);
    for (from, to) in l.layers.iter().zip(&merged.layers) {
        if let Some(adapter) = from.weight().adapter() {
            to.weight().update_f32(|w| adapter.merge_into(w).unwrap()).unwrap();
        }
    }
    let z = to_vec(&run(Op::Packed, &input(), &merged, MatmulMode::Gemm).unwrap()).unwrap();
    for (y, z) in y.iter().zip(&z) {
        assert!((y - z).abs() <= 1e-5, "{y} and {z}");
    }
}

#[test]
fn misfits_are_named() {
    let l = layers(Base::F32, 0.0, true);
    let adapter = l.layers[0].weight().adapter().unwrap();
    let why = |e: candle_core::Error| e.to_string();
    assert!(why(l.layers[0].weight().attach(Arc::clone(adapter)).unwrap_err()).contains("one already"));
    assert!(why(l.layers[1].weight().attach(Arc::clone(adapter)).unwrap_err()).contains("8×64"));
    let free = layers(Base::F32, 0.0, false);
    free.layers[0].weight().set_trainable(true);
    assert!(why(free.layers[0].weight().attach(Arc::clone(adapter)).unwrap_err()).contains("trained"));
    let (a, b) = (param("a", &[3, 8], 1), param("b", &[4, 2], 2));
    assert!(Adapter::new(Arc::clone(&a), b, 1.0, 0.0, Arc::default()).is_err());
    let b = param("b", &[4, 3], 2);
    assert!(Adapter::new(a, b, 1.0, 1.0, Arc::default()).is_err());
    l.dropout.enter(1, Some([1u64, 2].into()));
    let dropping = layers(Base::F32, 0.5, true);
    dropping.dropout.enter(1, Some([1u64, 2].into()));
    assert!(
        why(run(Op::Packed, &input(), &dropping, MatmulMode::Gemm).unwrap_err()).contains("2 dropout keys")
    );
}
