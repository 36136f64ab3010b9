//! A network with its weights, which scores and trains packed streams.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use omnigrpo_ops::{
    Device, Dropout, Lend, Memory, Param, ParamDtype, Part, Pass, RouterLoss, Rows, Tape, Var,
};
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
    Chosen, FileSource, OutlineOf, OutlineSource, Quantization, RandomSource, ReferenceSource, WeightDtype,
    WeightFiles,
};

/// A model: a checkpoint, a network and its weights.
///
/// ```
/// use omnigrpo_models::{Checkpoint, LoadOptions, Model};
///
/// # let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/checkpoints/qwen2_vl_untied");
/// let checkpoint = Checkpoint::open(directory.as_ref())?;
/// let model = Model::load_with(&checkpoint, &LoadOptions::default())?;
/// // Weights are named as in the files.
/// let head = model.params().iter().find(|weight| weight.name() == "lm_head.weight");
/// let config = model.decoder().config();
/// assert_eq!(head.map(|head| head.shape()), Some(&[config.vocab, config.hidden][..]));
/// # Ok::<(), omnigrpo_models::ModelError>(())
/// ```
pub struct Model {
    checkpoint: Checkpoint,
    network: Network,
    /// Weights of the architecture, followed by those of adapters.
    params: Vec<Arc<Param>>,
    num_base: usize,
    /// Names of the weights that were read from separate directories.
    outside: HashSet<String>,
    tower_runs: AtomicU64,
    pub(crate) lora: Option<LoraConfig>,
    /// Tensors that a loaded adapter contains in full. They are saved with the adapter even if they are no longer trained.
    pub(crate) whole: BTreeSet<String>,
    /// Alphas of single layers of a loaded adapter, keyed by the layer's published name.
    pub(crate) alphas: BTreeMap<String, f64>,
    device: Device,
    /// Files from which weights are read while the model is in use. They must not change.
    lenders: Option<WeightFiles>,
    /// Source of the decoder's weights that are not in memory all the time.
    lender: Option<Arc<dyn Lend>>,
}

/// Options for loading a checkpoint.
#[derive(Clone, Copy, Default)]
pub struct LoadOptions<'a> {
    /// Dtype of the weights.
    pub dtype: WeightDtype,
    /// Quantisation of the weights, if any.
    pub quantization: Option<Quantization<'a>>,
    /// Device on which the model runs.
    pub device: Device,
    /// Selects, by published name and part, the weights that stay in the mapped files where possible, without a copy. Such weights
    /// cannot be written or trained. Processes of one machine share their memory. The files must not change while the model is
    /// in use ([`Model::files_unchanged`]).
    pub in_place: Option<Chosen<'a>>,
}

/// Largest number of bytes of tower results that are kept per trained weight.
const KEPT_BYTES: usize = 8;

/// Output of a tower for one medium. Every pass with the same tower shares it; a clone shares the data. The results of the blocks
/// are kept in [`Memories`].
#[derive(Clone, Debug)]
pub struct Features {
    /// Output of the tower, before the projector.
    pub tower: Rows,
    /// Features in the language model's width, `[(1 + deep) · tokens, h]`: first the rows of the prompt, then the rows added
    /// after the first block, and so on ([`crate::DecoderConfig::deep`], mostly 0).
    pub rows: Rows,
}

/// Results of towers, keyed by (group, medium), for the backward pass; see [`Model::encode_for_training`].
#[derive(Debug, Default)]
pub struct Memories(BTreeMap<(usize, usize), Memory>);

/// Settings of a training pass, besides its weights and rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Training {
    /// Whether the backward pass recomputes the activations inside blocks instead of keeping them. This takes less memory and
    /// more time.
    pub recompute: bool,
    /// Key of the update for the dropout masks of adapters; updates with different keys have different masks.
    pub dropout_key: u64,
    /// Weights of the losses of expert routers.
    pub router: RouterPlan,
    /// Number of tokens of the whole update, and of the scored tokens among them. A prompt counts once for each of its
    /// completions. These numbers determine a stream's share of the routers' losses.
    pub step_tokens: [usize; 2],
}

/// A stream after its forward pass, with the tape for the backward pass.
pub struct StreamPass<'a> {
    model: &'a Model,
    stream: &'a PackedStream,
    tape: Tape,
    input: DecoderInput,
    hidden: Var,
    scored: Scored,
    /// Log-probability of each scored token, completion by completion, in nats.
    pub logprobs: Vec<f32>,
    /// Entropy at each scored token, in nats.
    pub entropies: Vec<f32>,
    router: Option<Arc<RouterLoss>>,
}

/// Gradients of media features, each in the shape of [`Features::rows`], keyed by (group, medium). A [`StreamPass`] returns them
/// for towers and projectors. Gradients of several streams are summed, so that a medium goes back through its tower once.
#[derive(Clone, Debug, Default)]
pub struct FeatureGradients(BTreeMap<(usize, usize), Rows>);

impl FeatureGradients {
    /// Adds the gradients of another stream, whose group `g` is `groups[g]` here.
    ///
    /// # Errors
    /// Returns an error if a medium has a different number of features.
    pub fn add(&mut self, other: Self, groups: &[usize]) -> Result<()> {
        for ((g, medium), d) in other.0 {
            let Some(&group) = groups.get(g) else {
                return Err(ModelError::shape(format!(
                    "feature gradients: got group {g}, expected one of {}",
                    groups.len()
                )));
            };
            match self.0.entry((group, medium)) {
                Entry::Vacant(empty) => drop(empty.insert(d)),
                Entry::Occupied(mut sum) => sum.get_mut().add(&d)?,
            }
        }
        Ok(())
    }
}

/// Opens a checkpoint's weight files. Also returns the names of the weights that are in separate directories.
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
            lender: None,
        }
    }

    /// Opens a checkpoint directory and loads it. All weights start frozen.
    ///
    /// # Errors
    /// Returns an error if the model is unknown, files are unreadable or tensors do not fit.
    pub fn load(dir: &Path, dtype: WeightDtype) -> Result<Self> {
        Self::load_with(&Checkpoint::open(dir)?, &LoadOptions { dtype, ..LoadOptions::default() })
    }

    /// Loads an opened checkpoint. All weights start frozen.
    ///
    /// # Errors
    /// Returns an error if files are unreadable or tensors do not fit.
    pub fn load_with(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Self> {
        let family = checkpoint.family();
        let (files, outside) = weight_files(checkpoint)?;
        let mut source =
            FileSource::new(&files, options.dtype).quantised(options.quantization).in_place(options.in_place);
        let network = family.architecture().network(&mut source)?;
        let params = source.finish(family.name())?;
        let mut model = Self::new(checkpoint.clone(), network, params, outside, options.device);
        model.lenders = Some(files).filter(|_| model.params.iter().any(|weight| weight.is_mapped()));
        Ok(model)
    }

    /// Builds a model with the configuration of a checkpoint and random weights, for training from scratch and for benchmarks.
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid.
    pub fn random(checkpoint: &Checkpoint, seed: u64, options: &LoadOptions) -> Result<Self> {
        let family = checkpoint.family();
        let (std, dtype, quantization) =
            (family.architecture().initializer_range(), options.dtype, options.quantization);
        let mut source = RandomSource { seed, std, dtype, quantization, params: Vec::new() };
        let network = family.architecture().network(&mut source)?;
        Ok(Self::new(checkpoint.clone(), network, source.params, HashSet::new(), options.device))
    }

    /// Builds the outline of the model that [`Self::load_with`], or with `random` [`Self::random`], returns. Its weights have
    /// names, shapes and dtypes but no data, so it cannot compute anything.
    ///
    /// # Errors
    /// Returns an error if files are unreadable. Only loading checks that the tensors fit.
    pub fn outline(checkpoint: &Checkpoint, options: &LoadOptions, random: bool) -> Result<Self> {
        let family = checkpoint.family();
        let files = if random { None } else { Some(weight_files(checkpoint)?.0) };
        let (dtype, quantization) = (options.dtype, options.quantization);
        let mut source = OutlineSource { files: files.as_ref(), dtype, quantization, params: Vec::new() };
        let network = family.architecture().network(&mut source)?;
        Ok(Self::new(checkpoint.clone(), network, source.params, HashSet::new(), options.device))
    }

    /// Builds the outline of this model, with its adapters: the same names, shapes and dtypes, without data.
    ///
    /// # Errors
    /// Returns an error if the adapters do not fit.
    pub fn to_outline(&self) -> Result<Self> {
        let weights = self.by_name();
        let mut source = OutlineOf { weights: &weights, tied: self.decoder().tied(), params: Vec::new() };
        let network = self.family().architecture().network(&mut source)?;
        let (checkpoint, outside) = (self.checkpoint.clone(), self.outside.clone());
        let mut outline = Self::new(checkpoint, network, source.params, outside, Device::Outline);
        if let Some(lora) = &self.lora {
            let bases = outline.by_name();
            for (weight, adapter) in self.adapted() {
                if let Some(base) = bases.get(weight.name()) {
                    outline.adapt(base, lora, adapter.rank(), None)?;
                }
            }
            outline.lora = Some(lora.clone());
        }
        Ok(outline)
    }

    /// Returns the weights of the architecture by published name.
    fn by_name(&self) -> HashMap<String, Arc<Param>> {
        self.base_params().iter().map(|param| (param.name().to_owned(), Arc::clone(param))).collect()
    }

    /// Builds a frozen model for the KL term. It copies the trained weights, shares the others and has no adapters.
    ///
    /// # Errors
    /// Returns an error if memory runs out.
    pub fn reference(&self) -> Result<Self> {
        self.reference_on(self.device)
    }

    /// Builds a reference as [`Self::reference`] does, to run on another device.
    pub fn reference_on(&self, device: Device) -> Result<Self> {
        self.reference_with(device, None)
    }

    /// Builds a reference that runs on the CPU and reads its copies of the trained weights in the checkpoint's files. This needs
    /// no memory between passes. A weight is copied instead if the file's values differ or the file cannot be mapped. The files
    /// must not change while the reference is in use ([`Self::files_unchanged`]).
    pub fn reference_in_place(&self) -> Result<Self> {
        let files = self.lenders();
        let mut reference = self.reference_with(Device::Cpu, files.as_ref())?;
        reference.lenders = files.filter(|_| reference.params.iter().any(|weight| weight.is_mapped()));
        Ok(reference)
    }

    /// Returns the bytes of memory that [`Self::reference_in_place`] takes if the weights equal the checkpoint's: the size of all
    /// copies, and the size of the largest weight that stays in a file. Also works for an outline.
    #[must_use]
    pub fn reference_bytes(&self) -> u64 {
        let files = self.lenders();
        let trained = self.base_params().iter().filter(|weight| weight.trainable());
        let (lent, copied): (Vec<_>, Vec<_>) =
            trained.partition(|weight| files.as_ref().is_some_and(|files| files.lends(weight)));
        let largest = lent.iter().map(|weight| weight.num_bytes()).max().unwrap_or(0);
        (largest + copied.iter().map(|weight| weight.num_bytes()).sum::<usize>()) as u64
    }

    /// Returns the bytes of the frozen weights that can stay in the checkpoint's files ([`LoadOptions::in_place`]). Also works for
    /// an outline.
    #[must_use]
    pub fn sharable_bytes(&self) -> u64 {
        let Some(files) = self.lenders() else { return 0 };
        let frozen = self.base_params().iter().filter(|weight| !weight.trainable() && files.lends(weight));
        frozen.map(|weight| weight.num_bytes() as u64).sum()
    }

    /// Opens the checkpoint's files. Returns `None` for a model of random weights without files.
    fn lenders(&self) -> Option<WeightFiles> {
        weight_files(&self.checkpoint).ok().map(|(files, _)| files)
    }

    /// Checks that the files from which weights are read have not been modified ([`LoadOptions::in_place`],
    /// [`Self::reference_in_place`]).
    ///
    /// # Errors
    /// Returns [`ModelError::Changed`] if a file has been modified.
    pub fn files_unchanged(&self) -> Result<()> {
        self.lenders.as_ref().map_or(Ok(()), WeightFiles::unchanged)
    }

    fn reference_with(&self, device: Device, files: Option<&WeightFiles>) -> Result<Self> {
        let policy = self.by_name();
        let mut source =
            ReferenceSource { policy: &policy, tied: self.decoder().tied(), files, params: Vec::new() };
        let network = self.family().architecture().network(&mut source)?;
        Ok(Self::new(self.checkpoint.clone(), network, source.params, self.outside.clone(), device))
    }

    /// Returns the checkpoint from which the model was built.
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

    /// Returns the weights of the adapters.
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

    /// Returns the settings of a pass over the weights, without dropout.
    #[must_use]
    pub fn pass(&self) -> Pass {
        Pass { lender: self.lender.clone(), ..Pass::on(self.device) }
    }

    /// Lets scoring and training passes fetch the weights of the decoder's [layers](Decoder::layers) from `lender`, layer by layer.
    /// For all other passes, the weights must be in memory.
    pub fn set_lender(&mut self, lender: Arc<dyn Lend>) {
        self.lender = Some(lender);
    }

    /// Fetches the weights of a layer, if they are not in memory all the time.
    fn lend(&self, layer: usize) -> Result<()> {
        Ok(self.lender.as_ref().map_or(Ok(()), |lender| lender.lend(layer))?)
    }

    /// Returns the settings of a training pass, with dropout if adapters use it. `rows` identifies each row of the pass; without
    /// `rows`, a row is identified by its index and `salt`.
    fn training_pass(&self, training: Training, rows: Option<&[u64]>, salt: u64) -> Pass {
        let on = self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        self.pass().dropping(on.then(|| Dropout::new(training.dropout_key ^ salt, rows.map(Arc::from))))
    }

    /// Returns whether an adapter of one of these parts uses dropout in training.
    fn drops(&self, parts: &[Part]) -> bool {
        self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0)
            && self.adapted().any(|(base, _)| parts.contains(&base.part()))
    }

    /// Returns the directory of the checkpoint.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.checkpoint.dir()
    }

    /// Returns whether any weight of `part` is trained.
    #[must_use]
    pub fn trains(&self, part: Part) -> bool {
        self.params.iter().any(|p| p.part() == part && p.trainable())
    }

    /// Returns whether any weight of a tower is trained.
    #[must_use]
    pub fn trains_tower(&self) -> bool {
        self.trains(Part::Vision) || self.trains(Part::Audio)
    }

    /// Returns whether any weight between the towers and the language model is trained.
    #[must_use]
    pub fn trains_projection(&self) -> bool {
        self.trains(Part::Projector) || self.trains(Part::Instruction)
    }

    /// Returns whether a weight was read from a separate directory and can stay there, because no weight of its part is trained.
    pub(crate) fn stays_outside(&self, param: &Param) -> bool {
        self.outside.contains(param.name()) && !self.trains(param.part())
    }

    /// Returns the weights to write into a saved copy. Untrained weights from separate directories are left out.
    pub(crate) fn saved_params(&self) -> Vec<Arc<Param>> {
        self.base_params().iter().filter(|p| !self.stays_outside(p)).map(Arc::clone).collect()
    }

    /// Returns the device on which the model runs.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Runs tower and projector on one medium of a prompt with this instruction ([`Prompt::instruction`]).
    ///
    /// # Errors
    /// Returns an error if the input has the wrong shape.
    pub fn encode(&self, medium: &MediumInput, instruction: &[u32]) -> Result<Features> {
        self.encode_in(medium, instruction, &self.pass())
    }

    fn encode_in(&self, medium: &MediumInput, instruction: &[u32], pass: &Pass) -> Result<Features> {
        let tower = self.tower(medium, pass, &mut Tape::off())?;
        let rows = self.network.encoder.project(&tower, medium, instruction, pass, &mut Tape::off())?;
        Ok(Features { tower: tower.into_rows(), rows: rows.into_rows() })
    }

    /// Computes the features of a medium from the tower output of another model with the same tower, on any device. Runs only the
    /// projector.
    ///
    /// # Errors
    /// Returns an error if the input has the wrong shape.
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

    /// Computes the features of every medium of a prompt, in order.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<Features>> {
        prompt.media.iter().map(|m| self.encode(m, &prompt.instruction)).collect()
    }

    /// Encodes several prompts as [`Self::encode_prompt`] does, for a later [`Self::backward_media`] with the same weights. Also
    /// returns the memories that [`Self::backward_media`] takes. They contain the results of the blocks of a trained tower, up to
    /// eight bytes for each trained weight: half of the size of weights, gradients and moments. Media beyond that limit run
    /// through the tower again.
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

    /// Returns the features to use in a training pass. `features` are those of the present weights; they are returned unchanged
    /// unless adapters of towers or projectors use dropout. In that case the features are computed again, as
    /// [`Self::backward_media`] will differentiate them.
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
    /// Returns an error if features do not fill their spans.
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
        let [embedding, _] = self.decoder().ends();
        self.lend(embedding)?;
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
                    "group {}, medium {}: the prompt has room for rows {}..{} of width {h}, but the projector returned {n} rows of \
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

    /// Returns how many times a medium has gone through the tower so far.
    #[must_use]
    pub fn tower_runs(&self) -> u64 {
        self.tower_runs.load(Ordering::Relaxed)
    }

    /// Returns whether updates change the features, because a weight of a tower or projector is trained.
    #[must_use]
    pub fn trains_media(&self) -> bool {
        self.trains_tower() || self.trains_projection()
    }

    /// Computes log-probabilities and entropies of a stream, per scored token, completion by completion. `features[group]`
    /// contains the features of the group's media, from any device.
    ///
    /// # Errors
    /// Returns an error if features do not fill their spans.
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
        self.lend(decoder.ends()[1])?;
        let scored = decoder.score(hidden.into_rows(), &stream.targets, temperature)?;
        self.device.finish()?;
        Ok((stream.by_completion(&scored.logprobs), stream.by_completion(&scored.entropies)))
    }

    /// Returns the language model's output, after its final norm, at the second-to-last token of each completion:
    /// `[completions, h]`. It is for heads other than that of the vocabulary. `features` are as in [`Self::score`].
    ///
    /// # Errors
    /// Returns an error if features do not fill their spans or a completion has fewer than two tokens.
    pub fn hidden_before_last(&self, stream: &PackedStream, features: &[Vec<Features>]) -> Result<Rows> {
        let mut tape = Tape::off();
        let input = self.embed(stream, |g, m| features.get(g)?.get(m).map(|f| &f.rows), &mut tape)?;
        let decoder = self.decoder();
        let rope = decoder.rope_table(&stream.positions);
        let (rows, pass) = (stream.last_rows()?, self.pass());
        let hidden = decoder.forward(input, &rope, &stream.layout, &rows, &pass, &mut tape)?;
        decoder.normed(hidden.rows())
    }

    /// Returns whether a [`DecoderMemory`](crate::DecoderMemory) can replace a forward pass in training. Then a rollout with the
    /// same weights computes the same values, up to rounding: there is no dropout, no weight is quantised (decoding multiplies
    /// such weights in a different way), and there are no experts.
    #[must_use]
    pub fn can_recall(&self) -> bool {
        self.can_recall_on(self.device)
    }

    /// Returns [`Self::can_recall`] for the same model on another device.
    #[must_use]
    pub fn can_recall_on(&self, device: Device) -> bool {
        let drops = self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        device.remembers_decoding()
            && !drops
            && self.decoder().config().experts.is_none()
            && !self.params.iter().any(|param| matches!(param.dtype(), ParamDtype::Quantised(_)))
    }

    /// Scores as [`Self::score`] does and keeps what a backward pass needs. `features` are those of the present weights, in the
    /// form that [`Self::features_in_training`] returns.
    ///
    /// # Errors
    /// Returns an error if features do not fill their spans.
    pub fn train_pass<'a>(
        &'a self,
        stream: &'a PackedStream,
        features: &[Vec<Features>],
        temperature: f32,
        training: Training,
    ) -> Result<StreamPass<'a>> {
        self.recall_pass(stream, features, temperature, training, Memory::default())
    }

    /// Runs [`Self::train_pass`] with the results of decoder blocks from an earlier pass, which do not run again
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
        self.lend(decoder.ends()[1])?;
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

    /// Replaces backward passes whose gradient is known to be 0: every weight that they would reach gets a gradient of zeros if
    /// it has none ([`Self::reach_decoder`], [`Self::reach_media`]). `idle` lists the groups of these streams.
    pub fn reach(
        &self,
        prompts: &[&Prompt],
        features: &[impl AsRef<[Features]>],
        idle: &[usize],
        gradients: &mut FeatureGradients,
    ) {
        if !idle.is_empty() {
            self.reach_decoder();
        }
        self.reach_media(prompts, features, idle, gradients);
    }

    /// Gives every weight of the decoder that has no gradient a gradient of zeros.
    pub fn reach_decoder(&self) {
        self.params.iter().filter(|p| p.part() == Part::Llm).for_each(|p| p.reach(self.device));
    }

    /// Gives one medium of each kind in the groups `idle` a gradient of zeros if no medium of this kind has a gradient. One per
    /// kind is enough, because media of the same kind reach the same weights.
    ///
    /// `features` are those of [`Self::backward_media`].
    pub fn reach_media(
        &self,
        prompts: &[&Prompt],
        features: &[impl AsRef<[Features]>],
        idle: &[usize],
        gradients: &mut FeatureGradients,
    ) {
        if !self.trains_media() {
            return;
        }
        let media = |g: usize| prompts.get(g).into_iter().flat_map(|p| &p.media).map(|m| m.kind);
        let mut kinds: Vec<MediumKind> = gradients.0.keys().filter_map(|&(g, m)| media(g).nth(m)).collect();
        for &g in idle {
            for (m, kind) in media(g).enumerate() {
                let own = features.get(g).and_then(|own| own.as_ref().get(m));
                if let Some(Features { rows, .. }) = own.filter(|_| !kinds.contains(&kind)) {
                    kinds.push(kind);
                    gradients.0.insert((g, m), Rows::zeros(self.device, rows.rows(), rows.cols()));
                }
            }
        }
    }

    /// Collects the gradients of each medium's features from those of a stream's input `[t, h]` and of the deep features in it.
    fn feature_gradients(
        &self,
        stream: &PackedStream,
        dx: &Rows,
        ddeep: Option<&Rows>,
    ) -> Result<FeatureGradients> {
        let (mut tokens, mut all) = (BTreeMap::new(), 0);
        for span in &stream.features {
            let end: &mut usize = tokens.entry((span.group, span.medium)).or_default();
            *end = (*end).max(span.feature + span.len);
            all += span.len;
        }
        let (h, deep) = (dx.cols(), self.decoder().config().deep);
        let rows = |n: usize| Rows::zeros(dx.device(), (1 + deep) * n, h);
        let mut gradients: BTreeMap<_, Rows> = tokens.iter().map(|(&key, &n)| (key, rows(n))).collect();
        let (mut seen, mut filled) = (0, BTreeSet::new());
        for span in &stream.features {
            let key = (span.group, span.medium);
            let (Some(own), Some(n)) = (gradients.get_mut(&key), tokens.get(&key)) else { continue };
            // Several completions of a group may show the same medium.
            let again = !filled.insert((key, span.feature));
            let mut put = |first: usize, from: &Rows, row: usize| -> Result<()> {
                if !again {
                    return Ok(own.set_rows(first, from, row..row + span.len)?);
                }
                let mut sum = from.row_range(row..row + span.len)?;
                sum.add(&own.row_range(first..first + span.len)?)?;
                Ok(own.set_rows(first, &sum, 0..span.len)?)
            };
            put(span.feature, dx, span.row)?;
            if let Some(ddeep) = ddeep {
                for l in 0..deep {
                    put((1 + l) * n + span.feature, ddeep, l * all + seen)?;
                }
            }
            seen += span.len;
        }
        Ok(FeatureGradients(gradients))
    }

    /// Propagates the gradients of features back through trained projectors and towers. Each medium runs forward once more, on a
    /// tape that lives for this medium only; results in `memories` are not computed again. The output of a frozen tower is taken
    /// from `features`, which are the originals and not the result of [`Self::features_in_training`]. `prompts`, `features` and
    /// `memories` are indexed by group.
    ///
    /// # Errors
    /// Returns an error if gradients belong to media that do not exist.
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
    /// Returns the losses of the routers, which the backward pass fills in, or `None` if no router loss is set.
    #[must_use]
    pub fn router(&self) -> Option<Arc<RouterLoss>> {
        self.router.clone()
    }

    /// Returns the decoder's results for the targets, in the stream's order.
    #[must_use]
    pub fn scored(&self) -> &Scored {
        &self.scored
    }

    /// Adds the gradients of every trained weight of the decoder, given dL/dlogp and dL/dentropy per scored token. Returns the
    /// gradients of the features for [`Model::backward_media`]; they are empty if neither towers nor projectors are trained.
    ///
    /// # Errors
    /// Returns an error if the lengths differ from the stream's.
    pub fn backward(self, dlogp: &[f32], dentropy: Option<&[f32]>) -> Result<FeatureGradients> {
        self.backward_by_block(dlogp, dentropy, &mut |_| {})
    }

    /// Runs [`Self::backward`] and calls `done` with the number of each block of the decoder when the gradients of its weights are
    /// complete. The last block comes first. The gradients of the output head and of the final norm are complete before.
    ///
    /// # Errors
    /// Returns an error if the lengths differ from the stream's.
    pub fn backward_by_block(
        self,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
        done: &mut dyn FnMut(usize),
    ) -> Result<FeatureGradients> {
        let Self { model, stream, tape, input, hidden, scored, .. } = self;
        if dlogp.len() != stream.num_targets() || dentropy.is_some_and(|d| d.len() != dlogp.len()) {
            return Err(ModelError::shape(format!(
                "backward: got {} gradients for {} scored tokens",
                dlogp.len(),
                stream.num_targets()
            )));
        }
        let dlogp = stream.by_target(dlogp);
        let dentropy = dentropy.map(|d| stream.by_target(d));
        let decoder = model.decoder();
        model.lend(decoder.ends()[1])?;
        let dhidden = decoder.score_backward(scored, &stream.targets, &dlogp, dentropy.as_deref())?;
        let mut inputs = tape.backward_by_block(&hidden, dhidden, done)?;
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
