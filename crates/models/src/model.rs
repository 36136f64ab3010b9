//! A network with its weights: scoring and training of packed streams.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use omnigrpo_ops::{Device, Dropout, Memory, Param, ParamDtype, Part, Pass, RouterLoss, Rows, Tape, Var};
use omnigrpo_text::MediumKind;

use crate::checkpoint::Checkpoint;
use crate::decoder::{Decoder, DecoderInput, DeepFeatures, Scored};
use crate::error::{ModelError, Result};
use crate::experts::RouterPlan;
use crate::families::{Family, MediumInput, Network};
use crate::lora::LoraConfig;
use crate::prompt::Prompt;
use crate::stream::PackedStream;
use crate::weights::{
    FileSource, OutlineSource, Quantization, RandomSource, ReferenceSource, WeightDtype, WeightFiles,
};

/// A model: checkpoint, network, weights.
///
/// ```
/// use omnigrpo_models::{Checkpoint, LoadOptions, Model};
///
/// # let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/checkpoints/qwen2_vl_untied");
/// let checkpoint = Checkpoint::open(directory.as_ref())?;
/// let model = Model::load_with(&checkpoint, &LoadOptions::default())?;
/// // Weights have the names that they have in the files.
/// let head = model.params().iter().find(|weight| weight.name() == "lm_head.weight");
/// let config = model.decoder().config();
/// assert_eq!(head.map(|head| head.shape()), Some(&[config.vocab, config.hidden][..]));
/// # Ok::<(), omnigrpo_models::ModelError>(())
/// ```
pub struct Model {
    checkpoint: Checkpoint,
    network: Network,
    /// Weights of the architecture, then of adapters.
    params: Vec<Arc<Param>>,
    num_base: usize,
    /// Weights that came from directories of their own.
    outside: HashSet<String>,
    tower_runs: AtomicU64,
    pub(crate) lora: Option<LoraConfig>,
    /// Tensors that a loaded adapter brought whole: they are saved with it even if they are trained no more.
    pub(crate) whole: BTreeSet<String>,
    /// Alphas of single layers of a loaded adapter, by the published name of the layer.
    pub(crate) alphas: BTreeMap<String, f64>,
    device: Device,
    /// Files that weights are read in while the model is used, which must not change.
    lenders: Option<WeightFiles>,
}

/// How a checkpoint is loaded.
#[derive(Clone, Copy, Default)]
pub struct LoadOptions<'a> {
    /// The dtype of the weights.
    pub dtype: WeightDtype,
    /// Which weights are held in few bits.
    pub quantization: Option<Quantization<'a>>,
    /// Where its passes run.
    pub device: Device,
    /// Leave weights in the mapped files where they can be read there: nothing is copied, and nothing can be written, so such a model
    /// cannot be trained. The files must stay as they are meanwhile.
    pub in_place: bool,
}

/// Bytes that may be kept of towers for each trained weight.
const KEPT_BYTES: usize = 8;

/// Output of a tower for one medium. Shared by every pass whose tower is the same; a clone shares the numbers. The results of the blocks
/// are kept in [`Memories`].
#[derive(Clone, Debug)]
pub struct Features {
    /// Output of the tower, before the projector.
    pub tower: Rows,
    /// Features in the language model's width, `[(1 + deep) · tokens, h]`: those in the prompt, then those that join behind the
    /// first block, and so on ([`crate::DecoderConfig::deep`], mostly 0).
    pub rows: Rows,
}

/// Results of towers, by (group, medium), for the pass that differentiates them; see [`Model::encode_for_training`].
#[derive(Debug, Default)]
pub struct Memories(BTreeMap<(usize, usize), Memory>);

/// Settings of a pass of one update beside weights and rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Training {
    /// Whether activations inside blocks are computed again in the backward pass instead of being kept: less memory, more
    /// time.
    pub recompute: bool,
    /// Names the update, for the dropout masks of adapters: masks differ between updates with different names.
    pub dropout_key: u64,
    /// Losses of the routers of experts.
    pub router: RouterPlan,
    /// Tokens of the whole update, a prompt counted once for each of its completions, and those of them that are scored: what
    /// a stream's share of the routers' losses goes by.
    pub step_tokens: [usize; 2],
}

/// A stream that has run forward with a tape.
pub struct StreamPass<'a> {
    model: &'a Model,
    stream: &'a PackedStream,
    tape: Tape,
    input: DecoderInput,
    hidden: Var,
    scored: Scored,
    /// Per scored token, completion by completion, in nats.
    pub logprobs: Vec<f32>,
    /// Entropy at each scored token, in nats.
    pub entropies: Vec<f32>,
    router: Option<Arc<RouterLoss>>,
}

/// Gradients of media features, each in the shape of [`Features::rows`], by (group, medium): what a [`StreamPass`] leaves for towers and
/// projectors. Those of several streams add up, so that a medium goes back through its tower once.
#[derive(Clone, Debug, Default)]
pub struct FeatureGradients(BTreeMap<(usize, usize), Rows>);

impl FeatureGradients {
    /// Adds the gradients of another stream, whose group `g` is `groups[g]` here.
    ///
    /// # Errors
    /// A medium with another number of features.
    pub fn add(&mut self, other: Self, groups: &[usize]) -> Result<()> {
        for ((g, medium), d) in other.0 {
            let Some(&group) = groups.get(g) else {
                return Err(ModelError::shape(format!("feature gradients: group {g} of {}", groups.len())));
            };
            match self.0.entry((group, medium)) {
                Entry::Vacant(empty) => drop(empty.insert(d)),
                Entry::Occupied(mut sum) => sum.get_mut().add(&d)?,
            }
        }
        Ok(())
    }
}

/// A checkpoint's files, and which of its weights lie in directories of their own.
fn weight_files(checkpoint: &Checkpoint) -> Result<(WeightFiles, HashSet<String>)> {
    let format = checkpoint.family().format();
    let mut files = WeightFiles::open(checkpoint.dir(), |key| format.published_name(key))?;
    let outside = files.add_companions(&format.companions())?;
    Ok((files, outside))
}

impl Model {
    pub(crate) fn new(
        checkpoint: Checkpoint,
        network: Network,
        params: Vec<Arc<Param>>,
        outside: HashSet<String>,
        device: Device,
    ) -> Self {
        let (num_base, whole) = (params.len(), BTreeSet::new());
        Self {
            checkpoint,
            network,
            params,
            num_base,
            outside,
            tower_runs: AtomicU64::new(0),
            lora: None,
            whole,
            alphas: BTreeMap::new(),
            device,
            lenders: None,
        }
    }

    /// Opens a checkpoint directory and loads it. All weights start frozen.
    ///
    /// # Errors
    /// An unknown model, unreadable files, tensors that do not fit.
    pub fn load(dir: &Path, dtype: WeightDtype) -> Result<Self> {
        Self::load_with(&Checkpoint::open(dir)?, &LoadOptions { dtype, ..LoadOptions::default() })
    }

    /// Loads an opened checkpoint. All weights start frozen.
    ///
    /// # Errors
    /// Unreadable files, tensors that do not fit.
    pub fn load_with(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Self> {
        let family = checkpoint.family();
        let (files, outside) = weight_files(checkpoint)?;
        let mut source =
            FileSource::new(&files, options.dtype).quantised(options.quantization).in_place(options.in_place);
        let network = family.architecture().network(&mut source)?;
        let params = source.finish(family.name())?;
        Ok(Self::new(checkpoint.clone(), network, params, outside, options.device))
    }

    /// A model with the configuration of a checkpoint and random weights: for training from nothing and for benchmarks.
    ///
    /// # Errors
    /// An impossible configuration.
    pub fn random(checkpoint: &Checkpoint, seed: u64, options: &LoadOptions) -> Result<Self> {
        let family = checkpoint.family();
        let (std, dtype, quantization) =
            (family.architecture().initializer_range(), options.dtype, options.quantization);
        let mut source = RandomSource { seed, std, dtype, quantization, params: Vec::new() };
        let network = family.architecture().network(&mut source)?;
        Ok(Self::new(checkpoint.clone(), network, source.params, HashSet::new(), options.device))
    }

    /// Returns the outline of what [`Self::load_with`], or with `random` [`Self::random`], returns, without the data of its weights: their
    /// names, shapes and dtypes. Nothing can be computed with it.
    ///
    /// # Errors
    /// Unreadable files. Tensors that do not fit are an error of loading.
    pub fn outline(checkpoint: &Checkpoint, options: &LoadOptions, random: bool) -> Result<Self> {
        let family = checkpoint.family();
        let files = if random { None } else { Some(weight_files(checkpoint)?.0) };
        let (dtype, quantization) = (options.dtype, options.quantization);
        let mut source = OutlineSource { files: files.as_ref(), dtype, quantization, params: Vec::new() };
        let network = family.architecture().network(&mut source)?;
        Ok(Self::new(checkpoint.clone(), network, source.params, HashSet::new(), options.device))
    }

    /// A frozen model for the KL term: copies of the weights that are trained, shared handles to the rest, no adapters.
    ///
    /// # Errors
    /// Out of memory.
    pub fn reference(&self) -> Result<Self> {
        self.reference_on(self.device)
    }

    /// Makes a reference as [`Self::reference`] does, with its passes on another device.
    pub fn reference_on(&self, device: Device) -> Result<Self> {
        self.reference_with(device, None)
    }

    /// Makes a reference for passes on the CPU, with the weights that are trained left in the checkpoint's files if these hold
    /// the very numbers: they take no memory between passes. Others are copied, as are those of files that cannot be mapped. The files
    /// must stay as they are while the reference is used ([`Self::files_unchanged`]).
    pub fn reference_in_place(&self) -> Result<Self> {
        let files = self.lenders();
        let mut reference = self.reference_with(Device::Cpu, files.as_ref())?;
        reference.lenders = files.filter(|_| reference.params.iter().any(|weight| weight.is_mapped()));
        Ok(reference)
    }

    /// Bytes of memory that [`Self::reference_in_place`] takes, if the weights are the checkpoint's: copies, and of what stays in files the
    /// largest weight. Of an outline too.
    #[must_use]
    pub fn reference_bytes(&self) -> u64 {
        let files = self.lenders();
        let trained = self.base_params().iter().filter(|weight| weight.trainable());
        let (lent, copied): (Vec<_>, Vec<_>) =
            trained.partition(|weight| files.as_ref().is_some_and(|files| files.lends(weight)));
        let largest = lent.iter().map(|weight| weight.num_bytes()).max().unwrap_or(0);
        (largest + copied.iter().map(|weight| weight.num_bytes()).sum::<usize>()) as u64
    }

    /// The checkpoint's files; a model of random weights may have none.
    fn lenders(&self) -> Option<WeightFiles> {
        weight_files(&self.checkpoint).ok().map(|(files, _)| files)
    }

    /// Fails where files that weights are read in have been written to since ([`Self::reference_in_place`]).
    ///
    /// # Errors
    /// [`ModelError::Changed`].
    pub fn files_unchanged(&self) -> Result<()> {
        self.lenders.as_ref().map_or(Ok(()), WeightFiles::unchanged)
    }

    fn reference_with(&self, device: Device, files: Option<&WeightFiles>) -> Result<Self> {
        let policy = self.base_params().iter().map(|p| (p.name().to_owned(), Arc::clone(p))).collect();
        let mut source =
            ReferenceSource { policy: &policy, tied: self.decoder().tied(), files, params: Vec::new() };
        let network = self.family().architecture().network(&mut source)?;
        Ok(Self::new(self.checkpoint.clone(), network, source.params, self.outside.clone(), device))
    }

    /// The checkpoint it was made from.
    #[must_use]
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Returns the family.
    #[must_use]
    pub fn family(&self) -> &Family {
        self.checkpoint.family()
    }

    /// Returns the language model.
    #[must_use]
    pub fn decoder(&self) -> &Decoder {
        &self.network.decoder
    }

    /// Returns the weights in building order, those of adapters last.
    #[must_use]
    pub fn params(&self) -> &[Arc<Param>] {
        &self.params
    }

    /// Returns the weights without those of adapters.
    #[must_use]
    pub fn base_params(&self) -> &[Arc<Param>] {
        &self.params[..self.num_base]
    }

    /// The weights of its adapters.
    #[must_use]
    pub fn adapter_params(&self) -> &[Arc<Param>] {
        &self.params[self.num_base..]
    }

    pub(crate) fn push_adapter_param(&mut self, param: Arc<Param>) {
        self.params.push(param);
    }

    pub(crate) fn forget_adapters(&mut self) {
        self.params.truncate(self.num_base);
        self.lora = None;
        self.whole.clear();
        self.alphas.clear();
    }

    /// A pass over its weights, without dropout.
    #[must_use]
    pub fn pass(&self) -> Pass {
        Pass::on(self.device)
    }

    /// A pass in which adapters drop inputs, if they do. `rows` names each row of the pass; without, rows are named by
    /// their index and `salt`.
    fn training_pass(&self, training: Training, rows: Option<&[u64]>, salt: u64) -> Pass {
        let on = self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        self.pass().dropping(on.then(|| Dropout::new(training.dropout_key ^ salt, rows.map(Arc::from))))
    }

    /// Whether an adapter of one of these parts drops inputs in training.
    fn drops(&self, parts: &[Part]) -> bool {
        self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0)
            && self.adapted().any(|(base, _)| parts.contains(&base.part()))
    }

    /// The directory it came from.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.checkpoint.dir()
    }

    /// Whether any weight of `part` is trained.
    #[must_use]
    pub fn trains(&self, part: Part) -> bool {
        self.params.iter().any(|p| p.part() == part && p.trainable())
    }

    /// Whether any weight of a tower is trained.
    #[must_use]
    pub fn trains_tower(&self) -> bool {
        self.trains(Part::Vision) || self.trains(Part::Audio)
    }

    /// Whether any weight between the towers and the language model is trained.
    #[must_use]
    pub fn trains_projection(&self) -> bool {
        self.trains(Part::Projector) || self.trains(Part::Instruction)
    }

    /// Whether a weight stays in the directory of its own that it came from: no weight of its part is trained.
    pub(crate) fn stays_outside(&self, param: &Param) -> bool {
        self.outside.contains(param.name()) && !self.trains(param.part())
    }

    /// The weights that belong into a saved copy. What came from a directory of its own and is not trained stays there.
    pub(crate) fn saved_params(&self) -> Vec<Arc<Param>> {
        self.base_params().iter().filter(|p| !self.stays_outside(p)).map(Arc::clone).collect()
    }

    /// Where its passes run.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Runs tower and projector on one medium of a prompt with this instruction ([`Prompt::instruction`]).
    ///
    /// # Errors
    /// Input that does not fit.
    pub fn encode(&self, medium: &MediumInput, instruction: &[u32]) -> Result<Features> {
        self.encode_in(medium, instruction, &self.pass())
    }

    fn encode_in(&self, medium: &MediumInput, instruction: &[u32], pass: &Pass) -> Result<Features> {
        let tower = self.tower(medium, pass, &mut Tape::off())?;
        let rows = self.network.encoder.project(&tower, medium, instruction, pass, &mut Tape::off())?;
        Ok(Features { tower: tower.into_rows(), rows: rows.into_rows() })
    }

    /// Features of a prompt's media from tower outputs of a model whose tower is the same, wherever it runs. Runs the
    /// projector only.
    ///
    /// # Errors
    /// Input that does not fit.
    pub fn project(&self, tower: &Rows, medium: &MediumInput, instruction: &[u32]) -> Result<Features> {
        self.project_in(tower, medium, instruction, &self.pass())
    }

    fn project_in(
        &self,
        tower: &Rows,
        medium: &MediumInput,
        instruction: &[u32],
        pass: &Pass,
    ) -> Result<Features> {
        let tower = Var::constant(tower.to_device(pass.device));
        let rows = self.network.encoder.project(&tower, medium, instruction, pass, &mut Tape::off())?;
        Ok(Features { tower: tower.into_rows(), rows: rows.into_rows() })
    }

    /// Features of every medium of a prompt, in order.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<Features>> {
        prompt.media.iter().map(|m| self.encode(m, &prompt.instruction)).collect()
    }

    /// Encodes several prompts as [`Self::encode_prompt`] does, for media that a backward pass with the same weights will go through
    /// ([`Self::backward_media`]), with the memories that it takes. What the blocks of a trained tower compute is kept for it,
    /// up to eight bytes for each trained weight, half of what weights, gradients and moments take; a medium beyond that
    /// runs once more there.
    pub fn encode_for_training<'p>(
        &self,
        prompts: impl IntoIterator<Item = &'p Prompt>,
    ) -> Result<(Vec<Vec<Features>>, Memories)> {
        let keep = self.trains_tower() && !self.drops(&[Part::Vision, Part::Audio]);
        let mut room = if keep {
            self.params.iter().filter(|p| p.trainable()).map(|p| KEPT_BYTES * p.len()).sum()
        } else {
            0
        };
        let (pass, mut memories, mut all) = (self.pass(), Memories::default(), Vec::new());
        for (g, prompt) in prompts.into_iter().enumerate() {
            let mut features = Vec::with_capacity(prompt.media.len());
            for (m, medium) in prompt.media.iter().enumerate() {
                let mut tape = if room > 0 { Tape::remembering(room) } else { Tape::off() };
                let tower = self.tower(medium, &pass, &mut tape)?;
                if let Some((memory, left)) = tape.into_memory() {
                    memories.0.insert((g, m), memory);
                    room = left;
                }
                features.push(self.project_in(tower.rows(), medium, &prompt.instruction, &pass)?);
            }
            all.push(features);
        }
        Ok((all, memories))
    }

    /// Returns the features for a policy pass instead of `features`, which are those of the present weights: the same, unless adapters
    /// of towers or projectors drop inputs. Then it is what [`Self::backward_media`] will differentiate.
    pub fn features_in_training(
        &self,
        prompt: &Prompt,
        features: &[Features],
        training: Training,
    ) -> Result<Vec<Features>> {
        let towers = self.drops(&[Part::Vision, Part::Audio]);
        if !towers && !self.drops(&[Part::Projector, Part::Instruction]) {
            return Ok(features.to_vec());
        }
        let media = prompt.media.iter().zip(features).enumerate();
        media
            .map(|(m, (medium, own))| {
                let pass = self.training_pass(training, None, prompt.medium_key(m));
                match towers {
                    true => self.encode_in(medium, &prompt.instruction, &pass),
                    false => self.project_in(&own.tower, medium, &prompt.instruction, &pass),
                }
            })
            .collect()
    }

    /// Returns the decoder's input for a prompt: token embeddings with features in their spans, and deep features.
    ///
    /// # Errors
    /// Features that do not fill their spans.
    pub fn embed_prompt(&self, prompt: &Prompt, features: &[Features]) -> Result<DecoderInput> {
        let stream = PackedStream::new(&[crate::GroupStream { prompt, completions: Vec::new() }])?;
        let rows: Vec<&Rows> = features.iter().map(|f| &f.rows).collect();
        self.embed(&stream, |_, medium| rows.get(medium).copied(), &mut Tape::off())
    }

    fn embed<'t>(
        &self,
        stream: &PackedStream,
        features: impl Fn(usize, usize) -> Option<&'t Rows>,
        tape: &mut Tape,
    ) -> Result<DecoderInput> {
        let (h, deep) = (self.decoder().config().hidden, self.decoder().config().deep);
        let mut x = self.decoder().embed(&stream.ids, &self.pass())?;
        let at: Vec<usize> = stream.features.iter().flat_map(|span| span.row..span.row + span.len).collect();
        let mut joining = Rows::zeros(self.device, deep * at.len(), h);
        let mut joined = 0;
        for span in &stream.features {
            let Some(rows) = features(span.group, span.medium) else {
                return Err(ModelError::shape(format!(
                    "group {}: no features were given for medium {}",
                    span.group, span.medium
                )));
            };
            let (n, width) = (rows.rows() / (1 + deep), rows.cols());
            if width != h || span.feature + span.len > n || n * (1 + deep) != rows.rows() {
                return Err(ModelError::shape(format!(
                    "group {}, medium {}: the prompt has room for rows {}..{} of width {h}, the projector made {n} of \
                     width {width}",
                    span.group,
                    span.medium,
                    span.feature,
                    span.feature + span.len
                )));
            }
            let rows = rows.to_device(self.device);
            x.set_rows(span.row, &rows, span.feature..span.feature + span.len)?;
            for l in 0..deep {
                let from = (1 + l) * n + span.feature;
                joining.set_rows(l * at.len() + joined, &rows, from..from + span.len)?;
            }
            joined += span.len;
        }
        let deep = (joining.rows() > 0).then(|| DeepFeatures {
            rows: if self.trains_media() { tape.input(joining) } else { Var::constant(joining) },
            at: Arc::new(at.into()),
        });
        Ok(DecoderInput { x: tape.input(x), deep })
    }

    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        self.tower_runs.fetch_add(1, Ordering::Relaxed);
        self.network.encoder.tower(medium, pass, tape)
    }

    /// How often a medium went through the tower so far.
    #[must_use]
    pub fn tower_runs(&self) -> u64 {
        self.tower_runs.load(Ordering::Relaxed)
    }

    /// Whether features change with the updates: some weight of a tower or projector is trained.
    #[must_use]
    pub fn trains_media(&self) -> bool {
        self.trains_tower() || self.trains_projection()
    }

    /// Log-probabilities and entropies of a stream, per scored token, completion by completion. `features[group]`
    /// holds the features of the group's media, from whatever device.
    ///
    /// # Errors
    /// Features that do not fill their spans.
    pub fn score(
        &self,
        stream: &PackedStream,
        features: &[Vec<Features>],
        temperature: f32,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let mut tape = Tape::off();
        let input = self.embed(stream, |g, m| features.get(g)?.get(m).map(|f| &f.rows), &mut tape)?;
        let decoder = self.decoder();
        let rope = decoder.rope_table(&stream.positions);
        let (rows, pass) = (&stream.targets.rows, self.pass());
        let hidden = decoder.forward(input, &rope, &stream.layout, rows, &pass, &mut tape)?;
        let scored = decoder.score(hidden.into_rows(), &stream.targets, temperature)?;
        self.device.finish()?;
        Ok((stream.by_completion(&scored.logprobs), stream.by_completion(&scored.entropies)))
    }

    /// Returns the language model's output for each completion's last token but one, `[completions, h]`, after its final norm: for a
    /// head of another kind than the vocabulary's. `features` are as in [`Self::score`].
    ///
    /// # Errors
    /// Features that do not fill their spans, a completion of less than two tokens.
    pub fn hidden_before_last(&self, stream: &PackedStream, features: &[Vec<Features>]) -> Result<Rows> {
        let mut tape = Tape::off();
        let input = self.embed(stream, |g, m| features.get(g)?.get(m).map(|f| &f.rows), &mut tape)?;
        let decoder = self.decoder();
        let rope = decoder.rope_table(&stream.positions);
        let (rows, pass) = (stream.last_rows()?, self.pass());
        let hidden = decoder.forward(input, &rope, &stream.layout, &rows, &pass, &mut tape)?;
        decoder.normed(hidden.rows())
    }

    /// Whether a forward pass in training gives what a rollout with the same weights gave, up to rounding, and a
    /// [`DecoderMemory`](crate::DecoderMemory) can take its place: nothing is dropped, no weight has few bits (which decoding multiplies in another
    /// way), and there are no experts.
    #[must_use]
    pub fn can_recall(&self) -> bool {
        self.can_recall_on(self.device)
    }

    /// Returns [`Self::can_recall`] of the same model on another device.
    #[must_use]
    pub fn can_recall_on(&self, device: Device) -> bool {
        let drops = self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        device.remembers_decoding()
            && !drops
            && self.decoder().config().experts.is_none()
            && !self.params.iter().any(|param| matches!(param.dtype(), ParamDtype::Quantised(_)))
    }

    /// Scores as [`Self::score`] does and keeps what a backward pass needs. `features` are those of the present weights, also where
    /// tower or projector are trained, as [`Self::features_in_training`] gives them.
    ///
    /// # Errors
    /// Features that do not fill their spans.
    pub fn train_pass<'a>(
        &'a self,
        stream: &'a PackedStream,
        features: &[Vec<Features>],
        temperature: f32,
        training: Training,
    ) -> Result<StreamPass<'a>> {
        self.recall_pass(stream, features, temperature, training, Memory::default())
    }

    /// Runs [`Self::train_pass`] with results of decoder blocks from an earlier pass; those blocks do not run again
    /// ([`DecoderMemory::of_stream`](crate::DecoderMemory::of_stream)).
    pub fn recall_pass<'a>(
        &'a self,
        stream: &'a PackedStream,
        features: &[Vec<Features>],
        temperature: f32,
        training: Training,
        recalled: Memory,
    ) -> Result<StreamPass<'a>> {
        let mut tape = Tape::recalling(recalled, training.recompute);
        let input = self.embed(stream, |g, m| features.get(g)?.get(m).map(|f| &f.rows), &mut tape)?;
        let decoder = self.decoder();
        let rope = decoder.rope_table(&stream.positions);
        let router = (!training.router.is_off()).then(|| {
            let RouterPlan { aux, z } = training.router;
            Arc::new(RouterLoss::new(aux, z, training.step_tokens, stream.copies.clone()))
        });
        let mut pass = self.training_pass(training, Some(&stream.keys), 0);
        pass.router.clone_from(&router);
        let rows = &stream.targets.rows;
        let hidden = decoder.forward(input.clone(), &rope, &stream.layout, rows, &pass, &mut tape)?;
        let scored = decoder.score(hidden.rows().clone(), &stream.targets, temperature)?;
        self.device.finish()?;
        Ok(StreamPass {
            logprobs: stream.by_completion(&scored.logprobs),
            entropies: stream.by_completion(&scored.entropies),
            model: self,
            stream,
            tape,
            input,
            hidden,
            scored,
            router,
        })
    }

    /// Stands in for backward passes whose gradient is known to be 0: whatever they would have reached has a gradient of
    /// zeros afterwards, if it had none. `idle` are the groups of such streams. Their media get a gradient of zeros in
    /// `gradients` where no medium of the kind has one; kinds differ in the weights they reach, media of a kind do not.
    pub fn reach(&self, prompts: &[&Prompt], idle: &[usize], gradients: &mut FeatureGradients) {
        if idle.is_empty() {
            return;
        }
        self.params.iter().filter(|p| p.part() == Part::Llm).for_each(|p| p.reach(self.device));
        if !self.trains_media() {
            return;
        }
        let (h, levels) = (self.decoder().config().hidden, 1 + self.decoder().config().deep);
        let media = |g: usize| prompts.get(g).into_iter().flat_map(|p| &p.media).map(|m| m.kind);
        let mut kinds: Vec<MediumKind> = gradients.0.keys().filter_map(|&(g, m)| media(g).nth(m)).collect();
        for &g in idle {
            for (m, kind) in media(g).enumerate() {
                if !kinds.contains(&kind) {
                    kinds.push(kind);
                    let rows: usize = prompts[g].spans.iter().filter(|s| s.medium == m).map(|s| s.len).sum();
                    gradients.0.insert((g, m), Rows::zeros(self.device, levels * rows, h));
                }
            }
        }
    }

    /// Collects the gradients of each medium's features from that of a stream's input `[t, h]` and of the deep features in it.
    fn feature_gradients(
        &self,
        stream: &PackedStream,
        dx: &Rows,
        ddeep: Option<&Rows>,
    ) -> Result<FeatureGradients> {
        let (mut tokens, mut all) = (BTreeMap::new(), 0);
        for span in &stream.features {
            *tokens.entry((span.group, span.medium)).or_insert(0) += span.len;
            all += span.len;
        }
        let (h, deep) = (dx.cols(), self.decoder().config().deep);
        let rows = |n: usize| Rows::zeros(dx.device(), (1 + deep) * n, h);
        let mut gradients: BTreeMap<_, Rows> = tokens.iter().map(|(&key, &n)| (key, rows(n))).collect();
        let mut seen = 0;
        for span in &stream.features {
            let key = (span.group, span.medium);
            let (Some(own), Some(n)) = (gradients.get_mut(&key), tokens.get(&key)) else { continue };
            own.set_rows(span.feature, dx, span.row..span.row + span.len)?;
            if let Some(ddeep) = ddeep {
                for l in 0..deep {
                    let from = l * all + seen;
                    own.set_rows((1 + l) * n + span.feature, ddeep, from..from + span.len)?;
                }
            }
            seen += span.len;
        }
        Ok(FeatureGradients(gradients))
    }

    /// Carries the gradients of features back through trained projectors and towers. A medium runs forward once more,
    /// on a tape that lives for this medium alone, but for what `memories` has; the output of a frozen
    /// tower is taken from `features`, the originals, not what [`Self::features_in_training`] made of them. `prompts`,
    /// `features` and `memories` are by group.
    ///
    /// # Errors
    /// Gradients of media that are not there.
    pub fn backward_media(
        &self,
        prompts: &[&Prompt],
        features: &[impl AsRef<[Features]>],
        mut memories: Memories,
        gradients: FeatureGradients,
        training: Training,
    ) -> Result<()> {
        let tower_trained = self.trains_tower();
        for ((g, m), d) in gradients.0 {
            let medium = prompts.get(g).and_then(|p| Some((*p, p.media.get(m)?)));
            let Some(((prompt, medium), own)) = medium.zip(features.get(g).and_then(|f| f.as_ref().get(m)))
            else {
                return Err(ModelError::shape(format!("feature gradients: group {g} has no medium {m}")));
            };
            let memory = memories.0.remove(&(g, m));
            let known = memory.is_some();
            let mut tape = memory
                .map_or_else(|| Tape::recording(training.recompute), |memory| Tape::recalling(memory, false));
            let pass = self.training_pass(training, None, prompt.medium_key(m));
            let tower = match (tower_trained, known) {
                (true, true) => self.network.encoder.tower(medium, &pass, &mut tape)?,
                (true, false) => self.tower(medium, &pass, &mut tape)?,
                (false, _) => Var::constant(own.tower.to_device(self.device)),
            };
            let rows = self.network.encoder.project(&tower, medium, &prompt.instruction, &pass, &mut tape)?;
            drop(tower);
            tape.backward(&rows, d)?;
        }
        Ok(())
    }
}

impl StreamPass<'_> {
    /// The losses of routers, which the backward pass fills in; `None` where none are asked for.
    #[must_use]
    pub fn router(&self) -> Option<Arc<RouterLoss>> {
        self.router.clone()
    }

    /// Returns the decoder's results for the targets, in the stream's order.
    #[must_use]
    pub fn scored(&self) -> &Scored {
        &self.scored
    }

    /// Adds the gradients of every trained weight of the decoder, given dL/dlogp and dL/dentropy per scored token. What
    /// reaches the features continues in [`Model::backward_media`]; it is empty where neither towers nor projectors
    /// are trained.
    ///
    /// # Errors
    /// Lengths that differ from the stream's.
    pub fn backward(self, dlogp: &[f32], dentropy: Option<&[f32]>) -> Result<FeatureGradients> {
        let Self { model, stream, tape, input, hidden, scored, .. } = self;
        if dlogp.len() != stream.num_targets() || dentropy.is_some_and(|d| d.len() != dlogp.len()) {
            return Err(ModelError::shape(format!(
                "backward: {} gradients for {} scored tokens",
                dlogp.len(),
                stream.num_targets()
            )));
        }
        let dlogp = stream.by_target(dlogp);
        let dentropy = dentropy.map(|d| stream.by_target(d));
        let decoder = model.decoder();
        let dhidden = decoder.score_backward(scored, &stream.targets, &dlogp, dentropy.as_deref())?;
        let mut inputs = tape.backward(&hidden, dhidden)?;
        let Some(dx) = inputs.take(&input.x) else { return Ok(FeatureGradients::default()) };
        let mut gradients = FeatureGradients::default();
        if model.trains_media() {
            let deep = input.deep.as_ref().and_then(|deep| inputs.take(&deep.rows));
            gradients = model.feature_gradients(stream, &dx, deep.as_ref())?;
        }
        let mut text = Vec::with_capacity(stream.rows());
        let mut at = 0;
        for (row, len) in stream.features.iter().map(|s| (s.row, s.len)).chain([(stream.rows(), 0)]) {
            text.extend(at..row);
            at = row + len;
        }
        if decoder.embedding().trainable() {
            let ids: Vec<u32> = text.iter().map(|&row| stream.ids[row]).collect();
            decoder.embed_backward(&ids, &dx.select(&text.into())?)?;
        }
        Ok(gradients)
    }
}
