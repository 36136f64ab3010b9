//! Sums over ranks on threads: on the CPU, and on emulators with and without a connection.
#![allow(clippy::unwrap_used)]

use std::thread;

use omnigrpo_ops::{Blocks, Device, Rows};
use omnigrpo_ranks::{GradientSum, Ranks, Threads};

const LEN: usize = 37;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Cpu,
    Card,
    ConnectedCards,
}

/// Sums of a rank: of all blocks, and of its own block.
type Sums = [Vec<u32>; 2];

/// Runs `body` as each of `size` ranks.
fn on<T: Send>(size: usize, place: Place, body: impl Fn(&Ranks, Device) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let rank = move |engine| {
            let ranks = Ranks::new(engine);
            let device = if place == Place::Cpu { Device::Cpu } else { Device::emulator().unwrap() };
            if let (Device::Gpu(card), Place::ConnectedCards) = (device, place) {
                assert_eq!(card.connect(&ranks, &[]).unwrap(), "NCCL 2.28");
            }
            body(&ranks, device)
        };
        let all: Vec<_> =
            Threads::new(size).into_iter().map(|engine| scope.spawn(move || rank(engine))).collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Puts a part of an array into the blocks, and returns the array.
fn fill(blocks: &mut Blocks, ranks: &Ranks, device: Device) -> Rows {
    let number =
        |i: usize| ((i * 31 + ranks.rank() * 17) as f32 * 0.7).sin() * 10f32.powi(ranks.rank() as i32);
    let count = LEN * ranks.size();
    let own = Rows::upload(device, (0..count + 5).map(number).collect(), 1, count + 5).unwrap();
    blocks.begin(LEN);
    // The first element and, on each rank, another one are absent.
    blocks.put(1, &own, 5..5 + ranks.rank()).unwrap();
    blocks.put(2 + ranks.rank(), &own, 6 + ranks.rank()..count + 4).unwrap();
    own
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn sums(ranks: &Ranks, device: Device, order: GradientSum) -> Sums {
    let mut blocks = Blocks::new(ranks, device);
    let mut own = fill(&mut blocks, ranks, device);
    let before = own.to_vec();
    blocks.sum(order).unwrap();
    blocks.get(0, &mut own, 2..2 + LEN * ranks.size()).unwrap();
    let all = own.to_vec();
    let end = 2 + LEN * ranks.size();
    assert_eq!((bits(&all[..2]), bits(&all[end..])), (bits(&before[..2]), bits(&before[end..])));
    fill(&mut blocks, ranks, device);
    let own = blocks.sum_own(order).unwrap();
    device.finish().unwrap();
    [bits(&all[2..end]), bits(&own)]
}

#[test]
fn sums_have_the_same_bits_on_all_devices() {
    for size in [2, 3] {
        let expected = on(size, Place::Cpu, |ranks, device| sums(ranks, device, GradientSum::Ordered));
        for (rank, [all, own]) in expected.iter().enumerate() {
            assert!(*all == expected[0][0] && *own == all[rank * LEN..][..LEN], "rank {rank}");
            assert_eq!(all[0], (-0.0f32).to_bits(), "no rank has the first element");
        }
        for place in [Place::Card, Place::ConnectedCards] {
            let got = on(size, place, |ranks, device| sums(ranks, device, GradientSum::Ordered));
            assert!(got == expected, "{size} ranks, {place:?}");
        }
    }
}

/// The stand-in of NCCL adds in another order than the tree.
#[test]
fn sums_of_the_engine_differ_by_rounding_only() {
    let of = |order| on(3, Place::ConnectedCards, |ranks, device| sums(ranks, device, order));
    let (ordered, engine) = (of(GradientSum::Ordered), of(GradientSum::Engine));
    assert!(ordered != engine, "the order of the engine is that of the tree");
    for ([a, _], [b, own]) in ordered.iter().zip(&engine) {
        assert!(own.iter().all(|x| b.contains(x)));
        let magnitude = 111.0 * 3.0 * 6e-8;
        let near = |(a, b): (&u32, &u32)| (f32::from_bits(*a) - f32::from_bits(*b)).abs() <= magnitude;
        assert!(a.iter().zip(b).all(near));
    }
}

/// Nothing goes through main memory between cards that are connected.
#[test]
fn numbers_stay_on_connected_cards() {
    for (place, crosses) in [(Place::Card, true), (Place::ConnectedCards, false)] {
        for traffic in on(2, place, |ranks, device| {
            let Device::Gpu(card) = device else { return Default::default() };
            let mut blocks = Blocks::new(ranks, device);
            let mut own = fill(&mut blocks, ranks, device);
            let before = card.traffic().unwrap();
            blocks.sum(GradientSum::Ordered).unwrap();
            blocks.get(0, &mut own, 0..LEN).unwrap();
            device.finish().unwrap();
            let [up, down, _] = card.traffic().unwrap();
            [up - before[0], down - before[1]]
        }) {
            assert_eq!(traffic.map(|count| count > 0), [crosses; 2], "{place:?}");
        }
    }
}

#[test]
fn places_beyond_the_blocks_are_refused() {
    let ranks = Ranks::default();
    let mut blocks = Blocks::new(&ranks, Device::Cpu);
    blocks.begin(4);
    let mut rows = Rows::from_vec(vec![1.0; 3], 1, 3).unwrap();
    let said = blocks.put(2, &rows, 0..3).unwrap_err().to_string();
    assert_eq!(said, "blocks: elements 0..3 of 3 to element 2 of 4");
    assert!(blocks.put(0, &rows, 1..4).is_err() && blocks.get(3, &mut rows, 0..2).is_err());
}
