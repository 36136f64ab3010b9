//! Decoding: repeatedly draws the next token of each row in a batch.
//!
//! On a GPU, a token takes one upload and one read. Once a batch shape has occurred twice, it also takes only one launch. Padding
//! rows, which belong to no completion, bring a batch to one of a few sizes; tables are padded likewise. Everything that differs
//! from token to token is stored in one array, whose address is fixed for each shape. The first batch of a shape runs with plain
//! launches in an arena. The second batch is recorded ([`omnigrpo_gpu::Graph`]), and later batches replay the recording. The bits
//! equal those of plain launches, since the bits of a row do not depend on the batch. If recording fails, tokens are computed
//! with plain launches and the reason is logged at level `debug`.

use std::collections::HashMap;
use std::sync::Arc;

use omnigrpo_gpu::{Arena, Array, Decoding, DecodingSize, DrawSize, Draws, Dtype, Graph, Pack, Sampling};
use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};

use crate::attention::{GroupCache, Pages};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::gpu::{Card, draw_rows, heads_of, sampling, sound};
use crate::host::Host;
use crate::mix::Tokens;
use crate::rope::RopeTable;
use crate::rows::Rows;

/// Rows of a batch that belong to one group.
pub struct DecodeRows<'a> {
    pub cache: &'a mut GroupCache,
    /// Slot of the completion that each row continues.
    pub slots: Vec<usize>,
}

/// Rows that decode together: the rows of all groups, in order.
pub struct DecodeBatch<'a> {
    pub(crate) groups: Vec<DecodeRows<'a>>,
    /// Cache positions of all rows, including padding, in the form that a GPU reads. They are created for the first layer.
    pub(crate) tables: Option<Arc<Decoding>>,
    /// Addresses of the states of all rows, if the model has recurrent layers.
    pub(crate) states: Option<Arc<Array>>,
    rows: usize,
}

impl<'a> DecodeBatch<'a> {
    /// Creates a batch of the rows of these groups.
    pub fn new(groups: Vec<DecodeRows<'a>>) -> Self {
        let rows = groups.iter().map(|group| group.slots.len()).sum();
        Self { groups, tables: None, states: None, rows }
    }

    /// Returns the number of rows, including padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Increments the length of every row's slot, after all layers have appended the token.
    pub fn advance(&mut self) {
        (self.tables, self.states) = (None, None);
        for group in &mut self.groups {
            group.cache.advance(&group.slots);
        }
    }
}

/// Inputs for the next token of every row.
pub struct TokenPass<'p, 'g> {
    /// Last token of each row.
    pub ids: &'p Tokens,
    /// Rotary angles of each row.
    pub rope: &'p Arc<RopeTable>,
    /// Rows of the batch, with the completions that they continue.
    pub batch: &'p mut DecodeBatch<'g>,
    draws: DrawsOf<'p>,
    /// Number of rows for which a token has been drawn.
    drawn: usize,
}

enum DrawsOf<'p> {
    Host { how: &'p Sampler<'p>, from: &'p [DrawFrom<'p>], drawn: Vec<Option<Draw>> },
    Card { card: Card, how: Sampling, draws: &'p Draws, out: &'p mut Array },
}

impl TokenPass<'_, '_> {
    /// Draws tokens from the logits of the next rows. The caller passes the logits of all rows, in one or more parts.
    pub fn draw(&mut self, mut logits: Rows) -> Result<()> {
        let (rows, vocab) = logits.dims();
        let these = self.drawn..self.drawn + rows;
        if these.end > self.ids.len() {
            let what = format!("rows {these:?} of {}", self.ids.len());
            return Err(Error::shape("draw", what));
        }
        match &mut self.draws {
            DrawsOf::Host { how, from, drawn } => drawn.extend(logits.draw(how, &from[these])?),
            DrawsOf::Card { card, how, draws, out } => {
                Device::Gpu(*card).check("draw", &logits)?;
                let first = these.start;
                card.change(&mut logits, |logits| card.gpu().draw(out, first, logits, vocab, how, draws));
            }
        }
        self.drawn += rows;
        Ok(())
    }
}

/// Statistics of decoding on a GPU.
#[derive(Clone, Debug, Default)]
pub struct Replays {
    /// Number of batch shapes that were recorded.
    pub recorded: usize,
    /// Number of tokens computed by replayed recordings, over all rows.
    pub replayed: usize,
    /// Number of tokens computed by individually launched kernels, over all rows.
    pub plain: usize,
    /// Reason why recording was disabled.
    pub refused: Option<String>,
}

/// Decoder that repeatedly draws the next tokens of rows, from one model with one sampler.
///
/// Weights must not change during its lifetime, because recordings read them at fixed addresses.
pub struct NextTokens<'a> {
    device: Device,
    how: Sampler<'a>,
    vocab: usize,
    card: Option<OnCard>,
}

impl<'a> NextTokens<'a> {
    /// Creates a decoder on a device, for logits over `vocab` tokens.
    pub fn new(device: Device, how: Sampler<'a>, vocab: usize) -> Self {
        let card = match device {
            Device::Gpu(card) => Some(OnCard::new(card)),
            _ => None,
        };
        Self { device, how, vocab, card }
    }

    /// Disables recording, so that every kernel is launched individually.
    #[must_use]
    pub fn plain(mut self) -> Self {
        if let Some(card) = &mut self.card {
            card.records = false;
        }
        self
    }

    /// Returns statistics of decoding on a GPU.
    pub fn replays(&self) -> Option<&Replays> {
        self.card.as_ref().map(|card| &card.replays)
    }

    /// Draws a token for each row of `groups` and increments the lengths in the caches. `ids` contains the last token of each
    /// row, and `rope` its angles. `pass` runs the model and passes the logits to [`TokenPass::draw`]. It must be the same for
    /// all calls and must not read results, because its launches may be recorded instead of executed. The result for a row is
    /// `None` if one of its logits is NaN or +∞, or if no token can be drawn.
    pub fn next<E: From<Error>>(
        &mut self,
        ids: Vec<u32>,
        rope: Arc<RopeTable>,
        groups: Vec<DecodeRows>,
        from: &[DrawFrom],
        mut pass: impl FnMut(&mut TokenPass) -> Result<(), E>,
    ) -> Result<Vec<Option<Draw>>, E> {
        let mut batch = DecodeBatch::new(groups);
        let rows = batch.rows();
        if [ids.len(), rope.rows(), from.len()] != [rows; 3] {
            let what =
                format!("{} ids, {} positions and {} draws for {rows}", ids.len(), rope.rows(), from.len());
            return Err(Error::shape("next tokens", what).into());
        }
        for group in &batch.groups {
            group.cache.check_device(self.device)?;
            group.slots.iter().try_for_each(|&slot| group.cache.check_room(slot, 1))?;
        }
        let drawn = match &mut self.card {
            Some(card) => card.next((ids, &rope), &mut batch, (&self.how, from, self.vocab), pass)?,
            None => {
                let draws = DrawsOf::Host { how: &self.how, from, drawn: Vec::with_capacity(rows) };
                let ids = Tokens::new(ids);
                let mut of = TokenPass { ids: &ids, rope: &rope, batch: &mut batch, draws, drawn: 0 };
                pass(&mut of)?;
                match of.draws {
                    DrawsOf::Host { drawn, .. } => drawn,
                    DrawsOf::Card { .. } => Vec::new(),
                }
            }
        };
        if drawn.len() != rows {
            let what = format!("logits of {} of {rows} rows on {}", drawn.len(), self.device);
            return Err(Error::shape("next tokens", what).into());
        }
        batch.advance();
        Ok(drawn)
    }
}

/// Sizes that determine, together with the model, the kernels, grids and memory for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    decoding: DecodingSize,
    draws: DrawSize,
}

/// State of a batch shape that has occurred.
struct Met {
    /// Inputs that differ from token to token.
    input: Arc<Array>,
    /// Drawn tokens.
    out: Array,
    graph: Option<Graph>,
}

/// Decoding state on a GPU.
struct OnCard {
    card: Card,
    arena: Arena,
    met: HashMap<Shape, Met>,
    replays: Replays,
    records: bool,
}

/// Offsets of a pass's inputs in their common array.
struct Places {
    ids: usize,
    angles: [usize; 2],
    tables: [usize; 4],
    states: Option<usize>,
    draws: omnigrpo_gpu::DrawPlaces,
}

impl OnCard {
    fn new(card: Card) -> Self {
        let arena = Arena::new(card.gpu());
        Self { card, arena, met: HashMap::new(), replays: Replays::default(), records: true }
    }

    fn next<E: From<Error>>(
        &mut self,
        (mut ids, rope): (Vec<u32>, &RopeTable),
        batch: &mut DecodeBatch,
        (how, from, vocab): (&Sampler, &[DrawFrom], usize),
        mut pass: impl FnMut(&mut TokenPass) -> Result<(), E>,
    ) -> Result<Vec<Option<Draw>>, E> {
        let (card, gpu, count) = (self.card, self.card.gpu(), batch.rows);
        let Some(first) = batch.groups.first() else { return Ok(Vec::new()) };
        let (heads, dtype) = (heads_of(first.cache.heads), Pages::dtype(first));
        let dtype = dtype.ok_or_else(|| Error::shape("next tokens", "a prompt without keys and values"))?;
        let (rows, how, from) = (gpu.batch_of(count), sampling(how), (how.forbidden, draw_rows(from)));

        let mut pack = Pack::default();
        let (decoding, tables) = card.continued(&mut batch.groups, dtype, |cached| {
            let size = DecodingSize::of(cached, heads).rounded(rows);
            (size, Decoding::pack(&mut pack, cached, heads, size))
        });
        let states = card.state_addresses(&mut batch.groups, rows);
        let draws = DrawSize::of(&from.1, &how).rounded(rows);
        ids.resize(rows, 0);
        let angles = rope.waves().each_ref().map(|angles| {
            let mut angles = angles.clone();
            angles.resize(rows * rope.half, 0.0);
            angles
        });
        let places = Places {
            ids: pack.add(&ids),
            angles: [0, 1].map(|i| pack.add(&angles[i])),
            tables,
            states: states.map(|addresses| pack.add(&addresses)),
            draws: Draws::pack(&mut pack, &from.1, draws, &how, from.0, vocab),
        };
        let shape = Shape { decoding, draws };
        let known = self.met.contains_key(&shape);
        let met = self.met.entry(shape).or_insert_with(|| Met {
            input: Arc::new(gpu.alloc(pack.words().len(), Dtype::F32)),
            out: gpu.drawn(rows),
            graph: None,
        });
        gpu.write_words(&met.input, pack.words());
        if met.graph.is_none() {
            let whole = &met.input;
            let part = |first, len| Array::part(whole, first, len);
            let device = Device::Gpu(card);
            let ids_of = Host::given(ids, device, part(places.ids, rows));
            let copies = places.angles.map(|at| part(at, rows * rope.half));
            let rope = RopeTable::of_waves(rope.half, angles, Host::given((), device, copies));
            let (rope, draws) = (Arc::new(rope), Draws::over(whole, places.draws, draws));
            let tables = Arc::new(Decoding::over(whole, places.tables, decoding));
            // An entry has two addresses of two words.
            let states = places.states.map(|at| Arc::new(part(at, 4 * rows)));
            let Met { out, graph, .. } = met;
            batch.rows = rows;
            let mut run = |out: &mut Array| -> Result<(), E> {
                // Each run starts with these tables, even if an earlier run has changed the batch.
                (batch.tables, batch.states) = (Some(Arc::clone(&tables)), states.clone());
                let draws = DrawsOf::Card { card, how, draws: &draws, out };
                let mut of = TokenPass { ids: &ids_of, rope: &rope, batch: &mut *batch, draws, drawn: 0 };
                pass(&mut of)?;
                match of.drawn == rows {
                    true => Ok(()),
                    false => {
                        let what = format!("logits of {} of {rows} rows", of.drawn);
                        Err(Error::shape("next tokens", what).into())
                    }
                }
            };
            if known && self.records {
                let mut done = Ok(());
                let made = gpu.capture(&self.arena, || done = run(out));
                match made {
                    Ok(made) => {
                        done?;
                        *graph = Some(made);
                        self.replays.recorded += 1;
                    }
                    Err(why) => {
                        tracing::debug!("decoding on {card} launches each kernel individually: {why}");
                        self.replays.refused = Some(why.to_string());
                        self.records = false;
                    }
                }
            }
            if graph.is_none() {
                gpu.within(&self.arena, || run(out))?;
            }
        }
        match &met.graph {
            Some(graph) => {
                gpu.replay(graph, &[&met.out]);
                self.replays.replayed += 1;
            }
            None => self.replays.plain += 1,
        }
        Ok(gpu.read_drawn(&met.out).into_iter().take(count).map(sound).collect())
    }
}
