//! `overlong`: 0 up to the start of a ramp below the length limit, falling to -1 at the limit. Range [-1, 0].
//!
//! Source: DAPO (arXiv 2503.14476), equation 13, as in TRL's soft overlong punishment.

use crate::contract::PerRow;
use crate::error::MAX_COMPLETION_TOKENS;
use crate::length::num_tokens;
use crate::{Reward, RewardError, RewardInput, RewardOptions};

pub(crate) fn reward(options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let (limit, ramp) = (options.max_completion_tokens, options.overlong_cache_tokens);
    if ramp > limit {
        return Err(RewardError::Setting {
            reward: "overlong".to_owned(),
            what: format!(
                "the ramp of {ramp} tokens is longer than {MAX_COMPLETION_TOKENS} {limit}; make it shorter"
            ),
        });
    }
    let score = move |input: &RewardInput<'_>| Ok(Some(punishment(num_tokens(input)?, limit, ramp)));
    Ok(Box::new(PerRow { name: "overlong", range: (-1.0, 0.0), score }))
}

fn punishment(num_tokens: usize, limit: usize, ramp: usize) -> f64 {
    let free = limit - ramp;
    if num_tokens <= free {
        0.0
    } else if num_tokens <= limit {
        -((num_tokens - free) as f64) / ramp as f64
    } else {
        -1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Row;

    #[test]
    fn golden() {
        // TRL's example (90 tokens, limit 100, ramp 20) and the corner cases.
        for (num_tokens, expected) in
            [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)]
        {
            assert_eq!(punishment(num_tokens, 100, 20), expected, "{num_tokens}");
        }
        assert_eq!(punishment(100, 100, 0), 0.0);
        assert_eq!(punishment(101, 100, 0), -1.0);
        let options = RewardOptions {
            max_completion_tokens: 10,
            overlong_cache_tokens: 11,
            ..RewardOptions::default()
        };
        assert!(Row::new("", "", "").try_score("overlong", &options).is_err());
    }
}
