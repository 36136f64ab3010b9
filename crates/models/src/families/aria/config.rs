//! `config.json` of Aria, as published for `transformers` and for the model's own code.
//!
//! Published files omit width and heads of the tower and the epsilon of the language model's norms; the defaults of the
//! `transformers` classes apply. The model's own code reads an expert's width from `moe_intermediate_size` and ignores
//! `intermediate_size`.

use std::collections::BTreeMap;

use crate::config_json::ConfigJson;
use crate::decoder::{DecoderConfig, TextDefaults};
use crate::encoders::{PictureConfig, SizeKeys};
use crate::error::Result;
use crate::experts::{ExpertNames, ExpertsConfig};

/// Names of the published files.
const EXPERTS: ExpertNames = ExpertNames {
    router: "mlp.router.weight",
    fc1: "mlp.experts.fc1.weight",
    fc2: "mlp.experts.fc2.weight",
    shared: Some("mlp.shared_experts"),
};

/// A whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct AriaConfig {
    /// Configuration of the language model.
    pub decoder: DecoderConfig,
    /// Configuration of the tower; the side of its pictures is that of the position table.
    pub tower: PictureConfig,
    /// Number of queries of the projector, keyed by the number of patches of a square, masked ones included.
    pub queries: BTreeMap<usize, usize>,
    /// Placeholder id of a feature.
    pub image_token: u32,
    /// Standard deviation of new weights.
    pub initializer_range: f32,
}

impl AriaConfig {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is missing or invalid.
    pub fn parse(json: &ConfigJson) -> Result<Self> {
        let text = json.required_section("text_config")?;
        let mut decoder =
            DecoderConfig::parse(&text, json, TextDefaults { padding: Some(2), ..TextDefaults::LLAMA })?;
        let experts = ExpertsConfig {
            count: text.size("moe_num_experts", Some(8))?,
            topk: text.size("moe_topk", Some(2))?,
            intermediate: text.size("moe_intermediate_size", Some(decoder.intermediate))?,
            names: &EXPERTS,
            recalled: false,
        };
        if experts.topk > experts.count {
            let what = format!("moe_topk is {}, but moe_num_experts is only {}", experts.topk, experts.count);
            return Err(text.error(what));
        }
        // Both sizes are at most 2²⁴.
        decoder.intermediate = experts.intermediate * text.size("moe_num_shared_experts", Some(2))?;
        decoder.experts = Some(experts);

        let vision = json.required_section("vision_config")?;
        let tower = PictureConfig::parse(&vision, &SizeKeys::IDEFICS3, 32)?;
        vision.only("num_channels", 3)?;
        json.only("vision_feature_layer", -1)?;
        let queries = match json.section("projector_patch_to_query_dict")? {
            None => BTreeMap::from([(1225, 128), (4900, 256)]),
            Some(table) => table
                .object()
                .keys()
                .map(|key| Ok((patches(&table, key, &tower)?, table.size(key, None)?)))
                .collect::<Result<_>>()?,
        };
        if queries.is_empty() {
            return Err(json.error("projector_patch_to_query_dict is empty"));
        }
        let key = json.either("image_token_id", "image_token_index");
        let image_token = json.token(key, 9, decoder.vocab)?;
        let initializer_range = text.spread("initializer_range", 0.02)?;
        Ok(Self { decoder, tower, queries, image_token, initializer_range })
    }

    /// Returns the number of patches along the side of a square.
    pub(super) fn grid(&self, side_px: usize) -> usize {
        side_px / self.tower.patch_px
    }

    /// Returns the number of features of a square of this side, or `None` if the projector does not support the side.
    pub fn tokens(&self, side_px: usize) -> Option<usize> {
        self.queries
            .get(&self.grid(side_px).pow(2))
            .copied()
            .filter(|_| side_px.is_multiple_of(self.tower.patch_px))
    }

    /// Returns the sides of squares that the projector supports, in px, ascending.
    pub fn sides(&self) -> Vec<usize> {
        self.queries.keys().map(|patches| patches.isqrt() * self.tower.patch_px).collect()
    }

    /// Returns the number of rows of the projector's table of queries.
    pub(super) fn max_queries(&self) -> usize {
        self.queries.values().copied().max().unwrap_or(1)
    }
}

/// Parses a key of the projector's table: a number of patches that form a square within the tower's position table.
fn patches(table: &ConfigJson, key: &str, tower: &PictureConfig) -> Result<usize> {
    let number = key.parse::<usize>().ok();
    number.filter(|&n| n > 0 && n <= tower.num_patches() && n.isqrt().pow(2) == n).ok_or_else(|| {
        table.error(format!(
            "projector_patch_to_query_dict has the key {key:?}; expected a square number of at most {} patches",
            tower.num_patches()
        ))
    })
}
