//! A row to score, for tests.

use serde_json::{Map, Value};

use crate::{RewardInput, RewardOptions, RowKey, Think, build};

pub(crate) struct Row {
    pub prompt: String,
    pub completion: String,
    pub ids: Vec<u32>,
    pub solution: Option<String>,
    pub columns: Map<String, Value>,
    pub think: Think,
    pub key: RowKey,
}

impl Row {
    pub fn new(prompt: &str, completion: &str, solution: &str) -> Self {
        Self {
            prompt: prompt.to_owned(),
            completion: completion.to_owned(),
            ids: Vec::new(),
            solution: Some(solution.to_owned()),
            columns: Map::new(),
            think: Think::On,
            key: RowKey { seed: 0, step: 0, row: 0, sample: 0 },
        }
    }

    pub fn sample(mut self, sample: u64) -> Self {
        self.key.sample = sample;
        self
    }

    pub fn think(mut self, think: Think) -> Self {
        self.think = think;
        self
    }

    pub fn column(mut self, name: &str, value: Value) -> Self {
        self.columns.insert(name.to_owned(), value);
        self
    }

    pub fn tokens(mut self, num_tokens: usize) -> Self {
        self.ids = vec![7; num_tokens];
        self
    }

    pub fn input(&self) -> RewardInput<'_> {
        RewardInput {
            prompt: &self.prompt,
            turns: &[],
            completion: &self.completion,
            completion_ids: &self.ids,
            solution: self.solution.as_deref(),
            columns: &self.columns,
            think: self.think,
            media_paths: &[],
            media: &[],
            key: self.key,
            truncated: false,
            added_turns: 0,
            is_text: false,
        }
    }

    /// Returns the score of this row by the named reward. An error fails the test.
    pub fn score(&self, name: &str, options: &RewardOptions) -> Option<f64> {
        self.try_score(name, options).unwrap()
    }

    pub fn try_score(&self, name: &str, options: &RewardOptions) -> Result<Option<f64>, crate::RewardError> {
        let set = build(&[name.to_owned()], options)?;
        Ok(set.score(&[self.input()])?.values[0][0])
    }
}
