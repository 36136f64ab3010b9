//! Adapters in every linear op: values, central differences, dropout under recomputation, frozen weights.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;

use omnigrpo_ops::{
    Adapter, Dropout, Error, Linear, Order, PackedLinear, Param, Part, Pass, QuantBits, QuantMatrix, Rows,
    Tape, Values,
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
    let values = Values::F32(noise(shape.iter().product(), seed));
    Arc::new(Param::new(name, Part::Llm, shape, values).unwrap())
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
    dropout: Option<Dropout>,
}

/// Builds query, key and value layers with 8, 4 and 4 outputs; the first and last have adapters.
fn layers(base: Base, rate: f32, adapted: bool) -> Layers {
    let layers = [("q", 8, true), ("k", 4, false), ("v", 4, true)].map(|(name, n, with)| {
        let seed = n as u32 + u32::from(name.as_bytes()[0]);
        let dense = noise(n * K, seed);
        let values = Values::F32(dense.clone());
        let weight = match base {
            Base::F32 => Param::new(name, Part::Llm, &[n, K], values).unwrap(),
            Base::Bf16 => Param::new(name, Part::Llm, &[n, K], values.into_bf16()).unwrap(),
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
            let adapter = Adapter::new(a, b, 0.7, rate).unwrap();
            layer.weight().attach(Arc::new(adapter)).unwrap();
        }
        layer
    });
    Layers { layers: layers.into(), dropout: None }
}

fn packed(l: &Layers, order: Order) -> PackedLinear {
    let pass = Pass { order, dropout: l.dropout.clone(), ..Pass::default() };
    PackedLinear::new(&l.layers.iter().collect::<Vec<_>>(), &pass)
}

fn run(x: &Rows, l: &Layers, order: Order) -> Result<Vec<f32>, Error> {
    Ok(packed(l, order).forward(x)?.into_vec())
}

fn input() -> Rows {
    Rows::from_vec(noise(ROWS * K, 1), ROWS, K).unwrap()
}

/// Returns the output, and the gradient of the input for the coefficients of [`loss`].
fn tape(l: &Layers, recompute: bool) -> (Vec<f32>, Vec<f32>) {
    let mut tape = Tape::recording(recompute);
    let x = tape.input(input());
    let packed = packed(l, Order::Blocked);
    let y = tape.segment([&x], move |tape, [x]| tape.apply(packed.clone(), [x])).unwrap();
    let (rows, cols) = y.rows().dims();
    let dy = Rows::from_vec(noise(rows * cols, 50), rows, cols).unwrap();
    let dx = tape.backward(&y, dy).unwrap().take(&x).unwrap();
    (y.into_rows().into_vec(), dx.into_vec())
}

/// Computes Σ c·y in f64.
fn loss(x: &Rows, l: &Layers) -> f64 {
    let y = run(x, l, Order::Blocked).unwrap();
    y.iter().zip(noise(y.len(), 50)).map(|(y, c)| f64::from(*y) * f64::from(c)).sum()
}

fn change(p: &Param, at: usize, by: f32) {
    p.update(|data| data[at] += by).unwrap();
}

/// The loss is linear in x, in A and in B, so central differences with a step of 1 are exact up to rounding. Values are
/// about 30 with 64 terms and the loss subtracts two of them, so 1e-4 leaves a margin of ten.
#[test]
fn gradients_equal_central_differences() {
    for base in BASES {
        for rate in [0.0, 0.4] {
            let mut l = layers(base, rate, true);
            if rate > 0.0 {
                l.dropout = Some(Dropout::new(9, Some([3u64, 1, 4, 1, 5].into())));
            }
            let (_, dx) = tape(&l, false);
            // Products of less than 32 bits round both factors; here inputs and gradients are about 1. Beside 4-bit weights an
            // input has one byte with 127 steps, half as many as bf16 has there, and a moved input changes the steps of others.
            let arithmetic = omnigrpo_ops::Arithmetic::default();
            let bytes = arithmetic.one_kernel();
            let rounded = match base {
                Base::F32 => 1e-4,
                Base::Quantised(QuantBits::Four) if bytes => 5e-2,
                Base::Quantised(QuantBits::Eight) if bytes => 2e-2,
                _ if arithmetic.rounds_bf16() => 2e-2,
                _ => 1e-4,
            };
            let near = |got: f32, want: f64, what: &str| {
                let error = (f64::from(got) - want).abs();
                let bound = if what == "dx" { rounded } else { 1e-4 };
                assert!(error <= bound, "{base:?} {rate} {what}: {got} for {want}");
            };
            for at in (0..ROWS * K).step_by(7) {
                let moved = |by: f32| {
                    let mut data = input().into_vec();
                    data[at] += by;
                    loss(&Rows::from_vec(data, ROWS, K).unwrap(), &l)
                };
                near(dx[at], (moved(1.0) - moved(-1.0)) / 2.0, "dx");
            }
            for layer in &l.layers {
                assert!(layer.weight().grad().is_none(), "a frozen weight has no gradient");
                let Some(adapter) = layer.weight().adapter() else { continue };
                for p in [adapter.a(), adapter.b()] {
                    let grad = p.grad().unwrap();
                    for at in (0..p.len()).step_by(5) {
                        change(p, at, 1.0);
                        let up = loss(&input(), &l);
                        change(p, at, -2.0);
                        let down = loss(&input(), &l);
                        change(p, at, 1.0);
                        near(grad[at], (up - down) / 2.0, p.name());
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
        for order in [Order::Blocked, Order::PerRow] {
            let plain = run(&x, &without, order).unwrap();
            let y = run(&x, &with, order).unwrap();
            let x = x.to_vec();
            let mut want = plain.iter().map(|&y| f64::from(y)).collect::<Vec<f64>>();
            let mut col = 0;
            for layer in &with.layers {
                if let Some(adapter) = layer.weight().adapter() {
                    let [a, b] = [adapter.a(), adapter.b()].map(|p| p.read().f32().into_owned());
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
                assert!((f64::from(*y) - want).abs() <= 2e-5, "{base:?} {order:?}: {y} for {want}");
            }
        }
        let plain = run(&x, &without, Order::Blocked).unwrap();
        // B = 0 leaves the bits of the base layer; so does a handle without the adapter.
        let handle = |l: &Linear| {
            Linear::new(Arc::new(l.weight().bare()), Some(Arc::clone(l.bias().unwrap()))).unwrap()
        };
        let bare = Layers { layers: with.layers.iter().map(handle).collect(), dropout: None };
        for adapter in with.layers.iter().filter_map(|l| l.weight().adapter()) {
            adapter.b().update(|b| b.fill(0.0)).unwrap();
        }
        for l in [&with, &bare] {
            assert_eq!(run(&x, l, Order::Blocked).unwrap(), plain, "{base:?}");
        }
    }
}

/// A residual is added first and summed with the rest in f32, so the last bits may differ.
#[test]
fn a_residual_is_added() {
    let residual = Rows::from_vec(noise(ROWS * 16, 99), ROWS, 16).unwrap();
    for base in BASES {
        let l = layers(base, 0.0, true);
        for order in [Order::Blocked, Order::PerRow] {
            let packed = packed(&l, order);
            let onto = packed.forward_onto(&residual, &input()).unwrap().into_vec();
            let alone = packed.forward(&input()).unwrap().into_vec();
            for ((onto, alone), residual) in onto.iter().zip(&alone).zip(residual.to_vec()) {
                assert!((onto - alone - residual).abs() <= 2e-5, "{base:?} {order:?}: {onto}");
            }
            assert!(packed.forward_onto(&residual.row_range(1..ROWS).unwrap(), &input()).is_err());
        }
    }
}

#[test]
fn recomputation_sees_the_same_mask() {
    let mut l = layers(Base::F32, 0.5, true);
    let grads = |l: &Layers, recompute: bool| {
        let adapter = l.layers[0].weight().adapter().unwrap();
        adapter.a().clear_grad();
        let (y, dx) = tape(l, recompute);
        (y, dx, adapter.a().grad().unwrap())
    };
    l.dropout = Some(Dropout::new(4, None));
    let first = grads(&l, false);
    assert_eq!(first, grads(&l, true));
    l.dropout = Some(Dropout::new(5, None));
    assert_ne!(first.0, grads(&l, false).0);
    l.dropout = None;
    let plain = grads(&l, false);
    assert_eq!(plain, grads(&l, true));
    let none = layers(Base::F32, 0.0, true);
    assert_eq!(plain.0, run(&input(), &none, Order::Blocked).unwrap());
}

#[test]
fn merging_gives_the_same_layer() {
    let l = layers(Base::F32, 0.0, true);
    let y = run(&input(), &l, Order::Blocked).unwrap();
    let merged = layers(Base::F32, 0.0, false);
    for (from, to) in l.layers.iter().zip(&merged.layers) {
        if let Some(adapter) = from.weight().adapter() {
            to.weight().update(|w| adapter.merge_into(w).unwrap()).unwrap();
        }
    }
    let z = run(&input(), &merged, Order::Blocked).unwrap();
    for (y, z) in y.iter().zip(&z) {
        assert!((y - z).abs() <= 1e-5, "{y} and {z}");
    }
}

#[test]
fn misfits_are_named() {
    let l = layers(Base::F32, 0.0, true);
    let adapter = l.layers[0].weight().adapter().unwrap();
    let why = |e: Error| e.to_string();
    assert!(why(l.layers[0].weight().attach(Arc::clone(adapter)).unwrap_err()).contains("second adapter"));
    assert!(why(l.layers[1].weight().attach(Arc::clone(adapter)).unwrap_err()).contains("8×64"));
    let free = layers(Base::F32, 0.0, false);
    free.layers[0].weight().set_trainable(true);
    assert!(why(free.layers[0].weight().attach(Arc::clone(adapter)).unwrap_err()).contains("trained"));
    let (a, b) = (param("a", &[3, 8], 1), param("b", &[4, 2], 2));
    assert!(Adapter::new(Arc::clone(&a), b, 1.0, 0.0).is_err());
    let b = param("b", &[4, 3], 2);
    assert!(Adapter::new(a, b, 1.0, 1.0).is_err());
    let dropout = Some(Dropout::new(1, Some([1u64, 2].into())));
    let dropping = Layers { dropout, ..layers(Base::F32, 0.5, true) };
    assert!(why(run(&input(), &dropping, Order::Blocked).unwrap_err()).contains("2 dropout keys"));
}
