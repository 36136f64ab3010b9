//! Comparison of the ranks of a run before its first step.
//!
//! Ranks with other settings, rows or weights would train different models together, or wait for each other for ever. Each rank
//! therefore describes what it has, by name and value, and all ranks compare the descriptions. They exchange texts, whose lengths may
//! differ, so the comparison itself works whatever the settings are. If a rank differs from the first one, all ranks end with the same
//! message, which names that rank and what differs.

use omnigrpo_ranks::Ranks;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::error::{Refusal, Result, TrainError};

/// Number of differences that a message lists.
const SHOWN: usize = 5;

/// A name with two different values.
pub(crate) struct Difference {
    /// Name of the setting or the input.
    pub(crate) name: String,
    /// Both values; `None` if they are digests.
    pub(crate) values: Option<[String; 2]>,
}

/// Returns the names whose values differ.
pub(crate) fn differences(old: &Map<String, Value>, new: &Map<String, Value>) -> Vec<Difference> {
    let names = new.keys().chain(old.keys().filter(|name| !new.contains_key(*name)));
    let said = |value: Option<&Value>| value.map_or("unset".to_owned(), Value::to_string);
    let is_digest = |value: Option<&Value>| {
        value
            .and_then(Value::as_str)
            .is_some_and(|text| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let values = |name: &str| {
        let [old, new] = [old.get(name), new.get(name)];
        (!is_digest(old) || !is_digest(new)).then(|| [said(old), said(new)])
    };
    names
        .filter(|name| old.get(*name) != new.get(*name))
        .map(|name| Difference { name: name.clone(), values: values(name) })
        .collect()
}

/// Checks that all ranks have the same names and values. `what` describes them. A value of 32 hexadecimal digits is a digest and is not
/// shown. `own` is the description of this rank, or the failure that left it without one.
///
/// # Errors
/// Returns the same refusal on all ranks if a rank differs from the first one, or the failure of a rank.
pub fn check(ranks: &Ranks, what: &str, own: Result<Map<String, Value>>) -> Result<()> {
    differing(ranks, what, own)?.map_or(Ok(()), |refusal| Err(refusal.into()))
}

/// Returns the value of this rank if no rank has failed and the descriptions of the values are the same on all ranks. One process
/// describes nothing.
///
/// # Errors
/// Returns the errors of [`check`].
pub(crate) fn same<T>(
    ranks: &Ranks,
    what: &str,
    own: Result<T>,
    describe: impl FnOnce(&T) -> Result<Map<String, Value>>,
) -> Result<T> {
    if ranks.size() == 1 {
        return own;
    }
    let (own, described) = match own {
        Ok(own) => {
            let described = describe(&own);
            (Some(own), described)
        }
        Err(error) => (None, Err(error)),
    };
    check(ranks, what, described)?;
    own.ok_or_else(|| TrainError::Data { what: format!("this rank has no values to compare in {what}") })
}

/// Compares the descriptions like [`check`], and returns the refusal if a rank differs from the first one.
pub(crate) fn differing(
    ranks: &Ranks,
    what: &str,
    own: Result<Map<String, Value>>,
) -> Result<Option<Refusal>> {
    if ranks.size() == 1 {
        return own.map(|_| None);
    }
    let (own, digest) = match own {
        Ok(own) => {
            let own = Value::Object(own).to_string();
            let digest = Sha256::digest(&own).to_vec();
            (own, Ok(digest))
        }
        Err(error) => (String::new(), Err(error)),
    };
    // Texts of many ranks are long, and almost always equal.
    let digests = ranks.share_all(digest, TrainError::cause)?;
    if digests.iter().all(|other| *other == digests[0]) {
        return Ok(None);
    }
    let all = ranks.gather_each(own.as_bytes())?;
    let parsed = |rank: usize| -> Result<Map<String, Value>> {
        serde_json::from_slice(&all[rank]).map_err(|error| {
            TrainError::Ranks(omnigrpo_ranks::Error::Unreadable { rank, what: error.to_string() })
        })
    };
    let first = parsed(0)?;
    for rank in 1..all.len() {
        if all[rank] == all[0] {
            continue;
        }
        let found = differences(&first, &parsed(rank)?);
        if !found.is_empty() {
            return Ok(Some(refusal(what, rank, &found)));
        }
    }
    Ok(None)
}

/// Returns the refusal of ranks of which one differs from the first.
fn refusal(what: &str, rank: usize, found: &[Difference]) -> Refusal {
    let shown = found.iter().take(SHOWN).map(|Difference { name, values }| match values {
        Some([first, other]) => format!("{name}: {first} on rank 0, {other} on rank {rank}"),
        None => format!("{name}: other content on rank {rank} than on rank 0"),
    });
    let mut shown: Vec<String> = shown.collect();
    if found.len() > SHOWN {
        shown.push(format!("… and {} more", found.len() - SHOWN));
    }
    Refusal::usage(format!("rank {rank} and rank 0 differ in {what}"))
        .got(shown.join("\n"))
        .expected("the same program, settings and files on all ranks")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use omnigrpo_ranks::Threads;
    use serde_json::json;

    use super::*;

    /// Compares the descriptions of ranks, each on a thread, and returns what each of them says.
    fn compared(of_ranks: &[Value]) -> Vec<Option<String>> {
        std::thread::scope(|scope| {
            let ranks = Threads::new(of_ranks.len()).into_iter().zip(of_ranks);
            let all: Vec<_> = ranks
                .map(|(engine, own)| {
                    let own = own.as_object().unwrap().clone();
                    scope.spawn(move || check(&Ranks::new(engine), "settings", Ok(own)))
                })
                .collect();
            all.into_iter().map(|rank| rank.join().unwrap().err().map(|error| error.to_string())).collect()
        })
    }

    #[test]
    fn the_first_rank_that_differs_is_named_on_all_ranks() {
        let same = json!({"seed": 1, "rows": [1.5, "a"]});
        assert_eq!(
            compared(&[same.clone(), json!({"rows": [1.5, "a"], "seed": 1}), same.clone()]),
            [None, None, None]
        );
        let said = compared(&[same.clone(), same, json!({"seed": 2}), json!({})]);
        let expected = "rank 2 and rank 0 differ in settings: got seed: 1 on rank 0, 2 on rank 2\nrows: [1.5,\"a\"] on rank 0, \
                        unset on rank 2; expected the same program, settings and files on all ranks";
        assert_eq!(said, vec![Some(expected.to_owned()); 4]);
        let digest = |byte: &str| json!({"dataset": byte.repeat(16)});
        let said = compared(&[digest("0a"), digest("0b")])[1].clone().unwrap();
        assert!(said.contains("dataset: other content on rank 1 than on rank 0"), "{said}");
        let many = |value: u32| (0..9).map(|i| (format!("s{i}"), json!(value))).collect::<Map<_, _>>().into();
        let said = compared(&[many(1), many(2)])[0].clone().unwrap();
        assert!(
            said.contains("s4: 1 on rank 0, 2 on rank 1\n… and 4 more") && !said.contains("s5"),
            "{said}"
        );
    }
}
