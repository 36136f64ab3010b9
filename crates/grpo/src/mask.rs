//! Selection of the tokens of a sampled row that belong to the completion: all up to and including the first stop token.

/// Returns the number of tokens that count towards the loss: up to and including the first id in `stop_ids`, or all of `ids` if
/// there is no stop token.
///
/// The stop token is part of the completion, because the policy must learn to emit it. `stop_ids` must be the set that stopped
/// the sampler. With another set, padding after the stop would count.
pub fn completion_length(ids: &[u32], stop_ids: &[u32]) -> usize {
    ids.iter().position(|id| stop_ids.contains(id)).map_or(ids.len(), |first_stop| first_stop + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOP: u32 = 2;

    fn mask(ids: &[u32], stop_ids: &[u32]) -> Vec<u8> {
        let length = completion_length(ids, stop_ids);
        (0..ids.len()).map(|t| u8::from(t < length)).collect()
    }

    #[test]
    fn the_first_stop_token_is_the_last_that_counts() {
        assert_eq!(mask(&[5, 6, STOP, 7, STOP], &[STOP]), [1, 1, 1, 0, 0]);
        assert_eq!(mask(&[5, 6, 7], &[STOP]), [1, 1, 1]);
        assert_eq!(mask(&[STOP, 6, 7], &[STOP]), [1, 0, 0]);
        assert_eq!(completion_length(&[], &[STOP]), 0);
    }

    #[test]
    fn any_of_several_stop_ids_ends_the_completion() {
        assert_eq!(completion_length(&[5, 9, STOP], &[STOP, 9]), 2);
    }
}
