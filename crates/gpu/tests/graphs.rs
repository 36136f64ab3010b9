//! Recorded work on the emulator: its results, its memory, and what cannot be recorded.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;

use omnigrpo_gpu::{
    Affine, Arena, Array, CachedGroup, Decoding, Dtype, Error, Gpu, Heads, Onto, PAGE, Place, Turn, Weight,
};

/// Computes `3 · (2 x) + x`, with an intermediate array that is freed and allocated again.
fn work(gpu: &Gpu, input: &Arc<Array>, out: &mut Array) {
    let x = Array::part(input, 4, 3);
    let mut a = gpu.cast(&x, Dtype::F32);
    gpu.scale(&mut a, 2.0);
    let mut b = gpu.cast(&a, Dtype::F32);
    drop(a);
    gpu.scale(&mut b, 3.0);
    let mut c = gpu.zeros(3, Dtype::F32);
    gpu.add(&mut c, &x);
    gpu.add(&mut c, &b);
    let place = Place::new(0, 3);
    gpu.copy_rows(out, place, &c, place, [1, 3]);
}

fn input(gpu: &Gpu, x: [f32; 3]) -> Arc<Array> {
    Arc::new(gpu.upload(&[0.0, 0.0, 0.0, 0.0, x[0], x[1], x[2], 0.0]))
}

fn write(gpu: &Gpu, to: &Array, x: [f32; 3]) {
    gpu.write_words(to, &[0.0, 0.0, 0.0, 0.0, x[0], x[1], x[2], 0.0].map(f32::to_bits));
}

#[test]
fn a_graph_replays_with_the_current_array_contents() {
    let gpu = Gpu::emulated(1);
    let (arena, mut out) = (Arena::new(&gpu), gpu.alloc(3, Dtype::F32));
    let x = input(&gpu, [1.0, 2.0, -4.0]);
    gpu.within(&arena, || work(&gpu, &x, &mut out));
    assert_eq!(out.to_vec(), [7.0, 14.0, -28.0]);
    // The third of a, b and c reuses the block of the first; blocks are as large as their arrays.
    assert_eq!(arena.num_bytes(), 24);
    write(&gpu, &x, [10.0, 0.5, 1.0]);
    let graph = gpu.capture(&arena, || work(&gpu, &x, &mut out)).unwrap();
    assert_eq!(out.to_vec(), [7.0, 14.0, -28.0], "recording computes nothing");
    for numbers in [[10.0, 0.5, 1.0], [0.0, 1.0, 3.0]] {
        write(&gpu, &x, numbers);
        gpu.replay(&graph, &[&out]);
        assert_eq!(out.to_vec(), numbers.map(|x| 7.0 * x));
    }
    // Other work does not get its memory, and the order of drops does not matter.
    let others: Vec<Array> = (0..8).map(|_| gpu.zeros(3, Dtype::F32)).collect();
    drop(arena);
    gpu.replay(&graph, &[&out]);
    assert_eq!(out.to_vec(), [0.0, 7.0, 21.0]);
    assert!(others.iter().all(|other| other.to_vec() == [0.0; 3]));
    gpu.check().unwrap();
}

#[test]
fn a_replay_leaves_nothing_of_an_earlier_run() {
    let gpu = Gpu::emulated(0);
    let (arena, out) = (Arena::new(&gpu), gpu.upload(&[1.0; 3]));
    let graph = gpu.capture(&arena, || ()).unwrap();
    gpu.replay(&graph, &[&out]);
    assert!(out.to_vec().iter().all(|x| x.is_nan()));
    // Memory between kernels keeps nothing either: it starts undefined in every run.
    let mut out = gpu.upload(&[1.0; 3]);
    let copies = |out: &mut Array| {
        let (a, place) = (gpu.alloc(3, Dtype::F32), Place::new(0, 3));
        gpu.copy_rows(out, place, &a, place, [1, 3]);
    };
    gpu.within(&arena, || drop(gpu.zeros(3, Dtype::F32)));
    let graph = gpu.capture(&arena, || copies(&mut out)).unwrap();
    gpu.replay(&graph, &[]);
    assert!(out.to_vec().iter().all(|x| x.is_nan()));
}

/// An operation that only a normal run can do is reported, and the device stays usable.
#[test]
fn unrecordable_work_is_refused() {
    let gpu = Gpu::emulated(0);
    let (arena, x) = (Arena::new(&gpu), input(&gpu, [1.0, 2.0, 3.0]));
    let mut out = gpu.zeros(3, Dtype::F32);
    gpu.within(&arena, || {
        work(&gpu, &x, &mut out);
        drop(gpu.alloc(8, Dtype::F32));
    });
    let refused = |f: &mut dyn FnMut()| gpu.capture(&arena, f).unwrap_err().to_string();
    let begins = "GPU work cannot be replayed: it ";
    let said = refused(&mut || assert!(out.to_vec().iter().all(|x| x.is_nan())));
    assert_eq!(said, format!("{begins}reads 12 bytes"));
    assert_eq!(
        refused(&mut || drop(gpu.upload(&[1.0; 8]))),
        format!("{begins}uploads 32 bytes from the host")
    );
    assert_eq!(refused(&mut || write(&gpu, &x, [9.0; 3])), format!("{begins}uploads 32 bytes from the host"));
    assert_eq!(refused(&mut || gpu.check().unwrap()), format!("{begins}waits for its own results"));
    let said = refused(&mut || drop(gpu.alloc(1000, Dtype::F32)));
    assert_eq!(said, format!("{begins}needs 4000 bytes of memory that the normal run did not use"));
    // The first reason is reported.
    let said = refused(&mut || {
        work(&gpu, &x, &mut out);
        drop(out.to_vec());
        drop(gpu.alloc(1000, Dtype::F32));
    });
    assert_eq!(said, format!("{begins}reads 12 bytes"));
    gpu.check().unwrap();
    work(&gpu, &x, &mut out);
    assert_eq!(out.to_vec(), [7.0, 14.0, 21.0], "the device computes on");
}

/// Counters of blocks outlive every graph. Memory that a recording allocates would live only in its graph.
#[test]
fn a_recording_does_not_allocate_counters() {
    let gpu = Gpu::emulated(0);
    let (arena, x) = (Arena::new(&gpu), gpu.cast(&gpu.upload(&[1.0; 8]), Dtype::Bf16));
    let mut y = gpu.zeros(1, Dtype::F32);
    gpu.within(&arena, || drop(gpu.alloc(0, Dtype::F32)));
    let mut product = || {
        let layer = Affine { weight: Weight::Dense(&x), bias: None, n: 1 };
        gpu.linear_rows(&mut y, [0, 1], &x, &[layer], 8, Onto::Nothing);
    };
    let said = gpu.capture(&arena, &mut product).unwrap_err().to_string();
    assert!(said.contains("needs counters that no normal run has allocated"), "{said}");
    product();
    let graph = gpu.capture(&arena, &mut product).unwrap();
    gpu.replay(&graph, &[]);
    assert_eq!(y.to_vec(), [8.0]);
    gpu.check().unwrap();
}

#[test]
fn memory_lives_as_long_as_its_graph() {
    let gpu = Gpu::emulated_with(0, 1000);
    let free = || gpu.memory().unwrap()[0];
    let (arena, other) = (Arena::new(&gpu), gpu.alloc(25, Dtype::F32));
    let held = Arc::new(gpu.zeros(50, Dtype::F32));
    let work = || drop(gpu.zeros(100, Dtype::F32));
    gpu.within(&arena, work);
    assert_eq!(free(), 300, "the arena keeps what its arrays gave back");
    // Arrays dropped during a recording live until it ends; kept values live as long as the graph.
    let mut dropped = Some(other);
    let graph = gpu
        .capture(&arena, || {
            work();
            gpu.keep(&held);
            dropped = None;
            assert_eq!(free(), 300);
        })
        .unwrap();
    assert_eq!(free(), 400);
    drop(held);
    assert_eq!(free(), 400);
    let too_large = gpu.alloc(200, Dtype::F32);
    assert!(matches!(gpu.check(), Err(Error::Memory { wanted: 800, free: 400, .. })));
    assert!(matches!(gpu.capture(&arena, work), Err(Error::Memory { .. })), "a device that failed");
    drop((too_large, graph, arena));
    assert_eq!(free(), 1000);
}

#[test]
fn an_arena_without_memory_reports_it() {
    let gpu = Gpu::emulated_with(0, 100);
    gpu.within(&Arena::new(&gpu), || drop(gpu.alloc(50, Dtype::F32)));
    assert!(matches!(gpu.check(), Err(Error::Memory { wanted: 200, free: 100, total: 100 })));
}

/// Another thread's work does not become part of a recording, and waits for its end.
#[test]
fn other_threads_wait_for_a_recording() {
    let gpu = Gpu::emulated(0);
    let arena = Arena::new(&gpu);
    let mut out = gpu.zeros(1, Dtype::F32);
    let (begun, begins) = std::sync::mpsc::channel();
    let (other, done) = (gpu.clone(), std::sync::atomic::AtomicBool::new(false));
    std::thread::scope(|scope| {
        let done = &done;
        let thread = scope.spawn(move || {
            begins.recv().unwrap();
            let numbers = other.upload(&[5.0]).to_vec();
            done.store(true, std::sync::atomic::Ordering::SeqCst);
            numbers
        });
        let graph = gpu.capture(&arena, || {
            begun.send(()).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!done.load(std::sync::atomic::Ordering::SeqCst));
            gpu.scale(&mut out, 2.0);
        });
        assert_eq!(thread.join().unwrap(), [5.0]);
        assert!(graph.is_ok());
    });
    // A panic inside also ends the recording.
    let panics = || gpu.capture(&arena, || std::panic::resume_unwind(Box::new(())));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    assert_eq!(gpu.upload(&[6.0]).to_vec(), [6.0]);
}

/// A layer of Qwen2.5's decoder takes eight kernels for a token: norm, q|k|v, prompt's keys, own keys, projection, norm, gate|up
/// with its activation, down. A replay computes the same bits as plain launches, also in a padding row, and each of its kernels
/// but the first starts early.
#[test]
fn a_decoder_layer_takes_eight_kernels() {
    let gpu = Gpu::emulated(1);
    let heads = Heads { q: 4, kv: 2, d: 64 };
    let (rows, h, inner, q, kv) = (2, 128, 136, heads.q * heads.d, heads.kv * heads.d);
    let packed = q + 2 * kv;
    let array = |n: usize, scale: f32| {
        let x: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0) * scale).collect();
        gpu.cast(&gpu.upload(&x), Dtype::Bf16)
    };
    let norms = [array(h, 1.0), array(h, 1.0)];
    let weights = [(q, h), (kv, h), (kv, h), (h, q), (inner, h), (inner, h), (h, inner)];
    let weights = weights.map(|(n, k)| (array(n * k, 0.1), n));
    let biases = [q, kv, kv].map(|n| array(n, 0.5));
    let layer = |i: usize| {
        let (weight, n) = &weights[i];
        Affine { weight: Weight::Dense(weight), bias: biases.get(i), n: *n }
    };
    let (cos, sin) = (gpu.upload(&[0.8; 64]), gpu.upload(&[0.6; 64]));
    let width = 2 * kv;
    let (prompt, page) = (array(3 * width, 1.0), array(PAGE * width, 1.0));
    let cached = [CachedGroup { prompt: &prompt, prompt_rows: 3, completions: vec![(vec![&page], 5)] }];
    let mut pack = omnigrpo_gpu::Pack::default();
    let size = omnigrpo_gpu::DecodingSize::of(&cached, heads).rounded(rows);
    let places = Decoding::pack(&mut pack, &cached, heads, size);
    let tables = Decoding::over(&pack.upload(&gpu), places, size);
    let x = gpu.cast(&array(rows * h, 2.0), Dtype::F32);
    let mut out = gpu.zeros(rows * h, Dtype::F32);
    let run = |out: &mut Array| {
        let mut qkv = gpu.alloc(rows * packed, Dtype::Bf16);
        let normed = gpu.rms(&x, &norms[0], 1e-6, Dtype::Bf16).0;
        let of_qkv = [layer(0), layer(1), layer(2)];
        gpu.linear_rows(&mut qkv, [0, packed], &normed, &of_qkv, h, Onto::Nothing);
        let turn = Turn { waves: Some([&cos, &sin]), norms: None };
        let attended = gpu.attend_cached(&qkv, &tables, 0, heads, turn);
        let mut y = gpu.alloc(rows * h, Dtype::F32);
        gpu.linear_rows(&mut y, [0, h], &attended, &[layer(3)], q, Onto::Residual(&x));
        let normed = gpu.rms(&y, &norms[1], 1e-6, Dtype::Bf16).0;
        let active = gpu.swiglu_rows(&normed, [layer(4), layer(5)], [rows, h], Dtype::Bf16);
        gpu.linear_rows(out, [0, h], &active, &[layer(6)], inner, Onto::Residual(&y));
    };
    let kernels = |f: &mut dyn FnMut()| {
        let count = || gpu.traffic().unwrap()[2];
        let before = count();
        f();
        count() - before
    };
    let arena = Arena::new(&gpu);
    assert_eq!(kernels(&mut || gpu.within(&arena, || run(&mut out))), 8);
    assert_eq!(gpu.early_launches(), Some(0));
    let plain = out.to_vec();
    assert!(plain.iter().all(|x| x.is_finite()), "a padding row has numbers, too");
    let graph = gpu.capture(&arena, || run(&mut out)).unwrap();
    for _ in 0..2 {
        assert_eq!(kernels(&mut || gpu.replay(&graph, &[&out])), 8);
        assert_eq!(out.to_vec(), plain);
    }
    assert_eq!(gpu.early_launches(), Some(2 * 7));
    gpu.check().unwrap();
}
