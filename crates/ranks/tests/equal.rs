//! Sums over ranks have the bits of one process, and all ranks leave a phase together.
#![allow(clippy::unwrap_used, clippy::ptr_arg)]

use std::thread;

use omnigrpo_guard::Fault;
use omnigrpo_ranks::sum::ABSENT;
use omnigrpo_ranks::{Cascade, Cause, Error, Local, Ranks, Result, Threads};

/// Runs `body` as each of `size` ranks and returns their results.
fn on<T: Send>(size: usize, body: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let all: Vec<_> =
            Threads::new(size).into_iter().map(|rank| scope.spawn(move || body(Ranks::new(rank)))).collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Gradient of a leaf; every seventh leaf has none.
fn leaf(index: usize, len: usize) -> Option<Vec<f32>> {
    let number = |i: usize| ((i * 31 + index * 17) as f32 * 0.7).sin() * 10f32.powi((index % 5) as i32 - 2);
    (index % 7 != 3).then(|| (0..len).map(number).collect())
}

fn add(to: &mut Vec<f32>, from: Vec<f32>) -> Result<()> {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
    Ok(())
}

/// Returns the bits of the sum over `leaves` leaves, of which each rank has neighbours.
fn sum(ranks: &Ranks, leaves: usize, len: usize) -> Vec<u32> {
    let (rank, size) = (ranks.rank(), ranks.size());
    let mut own = Cascade::default();
    for index in leaves * rank / size..leaves * (rank + 1) / size {
        own.push(leaf(index, len), add).unwrap();
    }
    let own = own.finish(add).unwrap();
    let mut data = own.unwrap_or_else(|| vec![ABSENT; len]);
    data.resize(len.next_multiple_of(size), 0.0);
    let mut parts = vec![0.0; data.len()];
    ranks.all_reduce(&mut data, &mut parts).unwrap();
    bits(&data[..len])
}

#[test]
fn one_rank_has_the_bits_of_two_and_four() {
    // An interpreter is slow.
    let long = if cfg!(miri) { 67 } else { 4099 };
    for (leaves, len) in [(4, 1), (4, 33), (8, long), (16, 33)] {
        let alone = sum(&Ranks::default(), leaves, len);
        assert!(alone.iter().all(|bits| f32::from_bits(*bits).is_finite()));
        for size in [1, 2, 4] {
            for bits in on(size, |ranks| sum(&ranks, leaves, len)) {
                assert!(bits == alone, "{leaves} leaves of {len} numbers on {size} ranks");
            }
        }
    }
}

#[test]
fn each_rank_gets_the_sum_of_its_block() {
    for (rank, own) in on(3, |ranks| {
        // Rank r has 10ʳ in every block but its own.
        let mut blocks = [10f32.powi(ranks.rank() as i32); 6];
        blocks[2 * ranks.rank()..][..2].fill(ABSENT);
        let mut parts = [0.0; 6];
        ranks.reduce_scatter(&blocks, &mut parts).unwrap().to_vec()
    })
    .into_iter()
    .enumerate()
    {
        assert_eq!(own, [[110.0, 101.0, 11.0][rank]; 2]);
    }
}

#[test]
fn values_of_all_ranks_arrive_unchanged() {
    let odd = f32::from_bits(0x3dcc_cccf);
    for (rank, (each, values, any, local)) in on(3, |ranks| {
        let own = vec![ranks.rank() as u8; ranks.rank()];
        let value = (vec![odd, f32::INFINITY, 1e-45], Some(ranks.rank() as f64 / 3.0), "é".to_owned());
        let mut root = [ranks.rank() as u64; 2];
        ranks.broadcast(2, &mut root).unwrap();
        assert_eq!(root, [2; 2]);
        (
            ranks.gather_each(&own).unwrap(),
            ranks.share(value).unwrap(),
            ranks.any(ranks.rank() == 1).unwrap(),
            ranks.local().unwrap(),
        )
    })
    .into_iter()
    .enumerate()
    {
        assert_eq!(each, [vec![], vec![1], vec![2, 2]]);
        for (from, (numbers, share, text)) in values.into_iter().enumerate() {
            assert_eq!(bits(&numbers), bits(&[odd, f32::INFINITY, 1e-45]));
            assert_eq!((share.unwrap(), text.as_str()), (from as f64 / 3.0, "é"));
        }
        assert!(any);
        assert_eq!(local, Local { rank, size: 3, machines: 1, machine: 0 });
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn all_ranks_get_the_first_failure_with_its_cause() {
    let full = |rank: usize| Error::Engine { call: "a step", what: format!("no space, {rank}") };
    let told = on(3, |ranks| {
        let own = if ranks.rank() > 0 { Err(full(ranks.rank())) } else { Ok(5) };
        let error = ranks.agree(own, |_| Fault::Machine).unwrap_err();
        let fault = if let Error::Other { fault, rank: 1, .. } = error { Some(fault) } else { None };
        (error.to_string(), fault)
    });
    let other = ("rank 1: a step failed: no space, 1".to_owned(), Some(Fault::Machine));
    assert_eq!(told, [other.clone(), ("a step failed: no space, 1".to_owned(), None), other]);
    let fine = on(2, |ranks| ranks.agree(Ok::<_, Error>(ranks.rank()), |_| Fault::Run).unwrap());
    assert_eq!(fine, [0, 1]);
}

#[test]
fn a_failure_that_all_ranks_know_keeps_its_rank() {
    let told = on(3, |ranks| {
        let cause =
            |error: &Error| Cause { fault: Fault::Machine, is_known: matches!(error, Error::Other { .. }) };
        let full = || Error::Engine { call: "a step", what: "no space".to_owned() };
        let own = if ranks.rank() == 1 { Err(full()) } else { Ok(()) };
        let known = ranks.agree(own, cause);
        ranks.agree(known, cause).unwrap_err().to_string()
    });
    assert_eq!(
        told,
        ["rank 1: a step failed: no space", "a step failed: no space", "rank 1: a step failed: no space"]
    );
}

#[test]
fn ranks_that_call_different_things_fail_and_do_not_hang() {
    let ended = on(2, |ranks| if ranks.rank() == 0 { Ok(()) } else { ranks.barrier() });
    assert!(ended[1].as_ref().unwrap_err().to_string().contains("rank 0 has ended"));
    let sizes = on(2, |ranks| ranks.all_gather(&vec![0u8; 1 + ranks.rank()]).map(|_| ()));
    assert!(sizes[0].as_ref().unwrap_err().to_string().contains("got 2 bytes, expected 1"));
}
