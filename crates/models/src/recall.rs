//! Results that the decoder computed while it sampled completions, for reuse in the training pass.
//!
//! Sampling runs each row of a stream `[prompt | completion 1 | … | completion G]` through the blocks once: the prompt's rows in
//! the prefill, the rows of a completion one by one. As long as the weights do not change, the forward pass of the first update
//! would compute the same rows again, up to rounding. [`DecoderMemory`] records the results instead, and
//! [`DecoderMemory::of_stream`] puts them into the stream's order for a tape that reads them back.
//!
//! Decoded rows arrive a few at a time, block by block. They are stored in large pieces, and those of a block are adjacent. The
//! stream is assembled block by block, so the memory that is freed makes room for the next block. Before that, the unused end of
//! each piece is given back.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use omnigrpo_kernels::buffer;
use omnigrpo_ops::{Memory, Rows};

use crate::block::{BlockArray, KeptBlock};
use crate::error::{ModelError, Result};
use crate::stream::PackedStream;

/// Largest number of rows in the first piece of decoded rows.
const PIECE: usize = 256;

/// Place where a row of a stream was computed.
#[derive(Clone, Copy)]
enum Place {
    /// Prompt and row within it.
    Prompt(usize, usize),
    /// Index among the decoded rows.
    Decoded(usize),
}

struct Prompt {
    ids: Vec<u32>,
    samples: usize,
    blocks: VecDeque<BTreeMap<BlockArray, Rows>>,
}

/// Results that the decoder computed while the completions of some prompts were sampled.
pub struct DecoderMemory {
    /// Rows that can still be stored; `None` after the limit was exceeded.
    room: Option<usize>,
    outputs_only: bool,
    /// Number of experts that each row uses.
    topk: usize,
    prompts: Vec<Prompt>,
    /// Prompt, sample and token of each decoded row.
    decoded: Vec<(usize, usize, u32)>,
    /// Total number of rows that the prompts so far may decode.
    expected: usize,
    /// Decoded rows, by block, then by array.
    stacks: Vec<BTreeMap<BlockArray, Stack>>,
    /// Experts of the decoded rows by block, as [`Routes::marks`](omnigrpo_ops::Routes::marks) has them.
    experts: Vec<Vec<u32>>,
    /// Whether the next rows belong to a prompt.
    in_prompt: bool,
}

impl DecoderMemory {
    /// Creates a memory for `room` rows; if more arrive, all but the experts of rows is dropped. With `outputs_only`, only the outputs of blocks
    /// are kept, for a pass that recomputes blocks.
    pub fn new(room: usize, outputs_only: bool) -> Self {
        Self {
            room: Some(room),
            outputs_only,
            topk: 0,
            prompts: Vec::new(),
            decoded: Vec::new(),
            expected: 0,
            stacks: Vec::new(),
            experts: Vec::new(),
            in_prompt: false,
        }
    }

    /// Announces the prefill of the next prompt, with `samples` completions of at most `longest` tokens each.
    pub fn begin_prompt(&mut self, ids: &[u32], samples: usize, longest: usize) {
        self.expected += samples * longest.saturating_sub(1);
        self.in_prompt = true;
        self.prompts.push(Prompt { ids: ids.to_vec(), samples, blocks: VecDeque::new() });
        self.take_room(ids.len());
    }

    /// Announces the rows of the next decoding step: prompt, sample and token of each.
    pub fn begin_step(&mut self, rows: impl Iterator<Item = (usize, usize, u32)>) {
        let before = self.decoded.len();
        self.decoded.extend(rows);
        self.in_prompt = false;
        self.take_room(self.decoded.len() - before);
    }

    fn take_room(&mut self, rows: usize) {
        self.room = self.room.and_then(|room| room.checked_sub(rows));
        if self.room.is_none() {
            (self.prompts, self.stacks) = (Vec::new(), Vec::new());
        }
    }

    /// Marks the end of decoding and gives unused memory back.
    pub fn finish(&mut self) {
        let pieces =
            self.stacks.iter_mut().flat_map(BTreeMap::values_mut).flat_map(|stack| &mut stack.pieces);
        pieces.for_each(Vec::shrink_to_fit);
    }

    /// Returns the experts of the rows of each completion, by prompt and sample. They are numbers of
    /// [`Routes::marks`](omnigrpo_ops::Routes::marks), `[rows, blocks]`. The map is empty for a model without experts.
    pub fn take_experts(&mut self) -> BTreeMap<(usize, usize), Vec<u32>> {
        let (mut all, blocks): (BTreeMap<_, Vec<u32>>, _) =
            (BTreeMap::new(), std::mem::take(&mut self.experts));
        for (row, &(prompt, sample, _)) in self.decoded.iter().enumerate() {
            let marks = blocks.iter().filter_map(|block| block.get(row));
            all.entry((prompt, sample)).or_default().extend(marks);
        }
        all
    }

    /// Keeps the results of block `l` for the announced rows.
    pub(crate) fn keep(&mut self, l: usize, y: &Rows, kept: KeptBlock) -> Result<()> {
        if let (false, Some(marks)) = (self.in_prompt, kept.marks()) {
            self.experts.resize_with(self.experts.len().max(l + 1), Vec::new);
            self.experts[l].extend(marks);
        }
        if self.room.is_none() {
            return Ok(());
        }
        let mut arrays = BTreeMap::from([(BlockArray::Output, y.clone())]);
        if !self.outputs_only {
            let (own, topk) = kept.into_arrays()?;
            arrays.extend(own);
            self.topk = topk;
        }
        if self.in_prompt {
            if let Some(prompt) = self.prompts.last_mut() {
                prompt.blocks.push_back(arrays);
            }
            return Ok(());
        }
        if self.stacks.len() == l {
            let stacks = arrays.iter().map(|(&name, rows)| (name, Stack::new(rows.cols())));
            self.stacks.push(stacks.collect());
        }
        let more = self.expected.saturating_sub(self.decoded.len());
        let mut stacks = self.stacks.get_mut(l).into_iter().flatten();
        stacks.try_for_each(|(name, stack)| arrays.get(name).map_or(Ok(()), |rows| stack.push(rows, more)))
    }

    /// Returns the results of the blocks in the order of `stream`, which must consist of exactly these prompts with all their
    /// samples. Returns `None` if results were dropped or the tokens of the stream differ. The weights must be those that
    /// sampled.
    ///
    /// # Errors
    /// Returns an error if rows are not on the CPU.
    pub fn of_stream(self, stream: &PackedStream) -> Result<Option<Memory>> {
        let Self { room: Some(_), topk, prompts, decoded, stacks, .. } = self else { return Ok(None) };
        let Some(places) = places(&prompts, &decoded, stream) else { return Ok(None) };
        let num_blocks = prompts.first().map_or(0, |prompt| prompt.blocks.len());
        let alone = stacks.is_empty();
        if prompts.iter().any(|p| p.blocks.len() != num_blocks) || !(alone || stacks.len() == num_blocks) {
            return Ok(None);
        }
        // In the last block, only scored rows continue past attention. Of a prompt, the prefill computed only the last row there.
        let scored: Vec<Place> = stream
            .targets
            .rows
            .iter()
            .map(|&row| match places[row] {
                Place::Prompt(prompt, _) => Place::Prompt(prompt, 0),
                decoded => decoded,
            })
            .collect();
        let (mut memory, mut prompts, mut stacks) = (Memory::default(), prompts, stacks.into_iter());
        for l in 0..num_blocks {
            let mut of_prompts: Vec<_> =
                prompts.iter_mut().filter_map(|prompt| prompt.blocks.pop_front()).collect();
            let mut of_decoded = stacks.next().unwrap_or_default();
            let mut take = |name: BlockArray| {
                let own: Vec<Option<Rows>> =
                    of_prompts.iter_mut().map(|arrays| arrays.remove(&name)).collect();
                let is_last = l + 1 == num_blocks;
                let places = if is_last && name.is_beyond_attention() { &scored } else { &places };
                gather(&own, of_decoded.remove(&name), places)
            };
            if let Some(y) = take(BlockArray::Output)? {
                memory.push(y, KeptBlock::from_arrays(take, topk)?);
            }
        }
        Ok(Some(memory))
    }
}

/// Returns the place where each row of the stream was computed, or `None` if the stream has other prompts or samples.
fn places(prompts: &[Prompt], decoded: &[(usize, usize, u32)], stream: &PackedStream) -> Option<Vec<Place>> {
    let first: Vec<usize> = prompts
        .iter()
        .scan(0, |next, prompt| Some(std::mem::replace(next, *next + prompt.samples)))
        .collect();
    let mut of_sample = vec![Vec::new(); prompts.iter().map(|prompt| prompt.samples).sum()];
    for (row, &(prompt, sample, _)) in decoded.iter().enumerate() {
        of_sample.get_mut(first.get(prompt)? + sample)?.push(row);
    }
    if !of_sample.iter().map(Vec::len).eq(stream.own_rows.iter().map(Range::len)) {
        return None;
    }
    let (mut places, mut ids) = (Vec::with_capacity(stream.rows()), Vec::with_capacity(stream.rows()));
    for (at, prompt) in prompts.iter().enumerate() {
        places.extend((0..prompt.ids.len()).map(|row| Place::Prompt(at, row)));
        ids.extend_from_slice(&prompt.ids);
        for &row in of_sample[first[at]..first[at] + prompt.samples].iter().flatten() {
            places.push(Place::Decoded(row));
            ids.push(decoded[row].2);
        }
    }
    (ids == stream.ids).then_some(places)
}

/// Copies one array of a block into the stream's order. Returns `None` if the block does not keep this array.
fn gather(prompts: &[Option<Rows>], decoded: Option<Stack>, places: &[Place]) -> Result<Option<Rows>> {
    let Some(cols) = prompts.iter().flatten().map(Rows::cols).next() else { return Ok(None) };
    let of_prompts: Option<Vec<&[f32]>> = prompts.iter().map(|rows| rows.as_ref()?.host()).collect();
    let of_prompts = of_prompts.ok_or_else(|| ModelError::shape("recall: rows are on another device"))?;
    let numbers = |at: usize| -> Option<&[f32]> {
        match places[at] {
            Place::Prompt(prompt, row) => of_prompts.get(prompt)?.get(row * cols..(row + 1) * cols),
            Place::Decoded(row) => decoded.as_ref()?.row(row),
        }
    };
    if let Some(at) = (0..places.len()).find(|&at| numbers(at).is_none()) {
        return Err(ModelError::shape(format!("recall: row {at} of {} was not kept", places.len())));
    }
    let all = buffer::of_parts(places.len(), cols, |at| numbers(at).unwrap_or_default());
    Ok(Some(Rows::from_vec(all, places.len(), cols)?))
}

/// Consecutive rows, stored in pieces.
struct Stack {
    cols: usize,
    rows: usize,
    /// Data of the rows. Each piece is as large as all pieces before it together, within the bounds of [`Stack::push`].
    pieces: Vec<Vec<f32>>,
}

impl Stack {
    fn new(cols: usize) -> Self {
        Self { cols, rows: 0, pieces: Vec::new() }
    }

    /// Appends rows. At most `more` rows will follow them.
    fn push(&mut self, rows: &Rows, more: usize) -> Result<()> {
        let numbers = rows.host().filter(|_| rows.cols() == self.cols);
        let mut numbers = numbers
            .ok_or_else(|| ModelError::shape("recall: rows are on another device or have another width"))?;
        let most = rows.rows() + more;
        let cols = self.cols;
        let room = |piece: &Vec<f32>| piece.capacity() / cols * cols - piece.len();
        while !numbers.is_empty() {
            if self.pieces.last().is_none_or(|piece| room(piece) == 0) {
                self.pieces.push(Vec::with_capacity(self.rows.max(PIECE).min(most) * cols));
            }
            let Some(piece) = self.pieces.last_mut() else { break };
            let (own, rest) = numbers.split_at(numbers.len().min(room(piece)));
            piece.extend_from_slice(own);
            (numbers, self.rows) = (rest, self.rows + own.len() / cols);
        }
        Ok(())
    }

    fn row(&self, row: usize) -> Option<&[f32]> {
        let mut at = row * self.cols;
        let piece = self.pieces.iter().find(|piece| {
            let here = at < piece.len();
            at -= if here { 0 } else { piece.len() };
            here
        })?;
        piece.get(at..at + self.cols)
    }
}
