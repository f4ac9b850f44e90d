//! Brings experts from RAM to the device for passes of many rows, a few at a time: the processor would take longer to compute them
//! than the bus takes to carry them. While some are copied, the next ones are written to pinned memory.
use cubecl::server::Handle;
use kernels::quant::QuantType;
use kernels::threads::Threads;
use kernels::tile::Layout;
use kernels_models::ram::{RamExperts, Split, expert_tiles};
use kernels_models::stage::{StageError, StageOptions};
use kernels_models::weights::ModelFile;

use super::GpuEngine;
use super::layers::{Bank, NO_SLOT, Slots};
use super::memory::Memory;
use crate::error::failed;
use crate::platform::Platform;
use crate::product::ExpertMatrix;
use crate::product::operands::Matrix;
use crate::upload::Upload;

/// Bytes of gate and up, or of down, that are copied at once, unless one expert takes more: copying them takes about a millisecond.
const SLAB_BYTES: usize = 32 << 20;
/// One is filled while the other is computed with.
const BANKS: usize = 2;

/// Pinned memory, and device memory for some experts.
pub(super) struct Stream {
    upload: Upload,
    /// Memory of gate and up, and of down.
    banks: [[Place; 2]; BANKS],
    /// Formats and columns of gate, up and down, and their rows, by layer of the stage; those without experts in RAM have none.
    shapes: Vec<Option<[TileShape; 3]>>,
}

/// Device memory and its address.
struct Place {
    buffer: Handle,
    address: u64,
}

/// The matrix of one expert.
#[derive(Clone, Copy)]
struct TileShape {
    kind: QuantType,
    rows: usize,
    cols: usize,
}

impl TileShape {
    fn bytes(self) -> usize {
        Layout::of(self.kind).matrix_bytes(self.rows, self.cols)
    }
}

impl Stream {
    /// `None` if the runtime cannot copy from pinned memory.
    ///
    /// # Errors
    /// No memory to pin, or none on the device.
    pub(super) fn new<R: Platform>(
        memory: &Memory<'_, R>,
        file: &ModelFile,
        options: &StageOptions,
        split: &Split,
    ) -> Result<Option<Self>, StageError> {
        let shape = |(layer, in_ram): (usize, &usize)| match in_ram {
            0 => Ok(None),
            _ => expert_tiles(file, layer)
                .map(|tiles| Some(tiles.map(|(kind, [rows, cols])| TileShape { kind, rows, cols }))),
        };
        let shapes = options.layers.clone().zip(&split.counts).map(shape).collect::<Result<Vec<_>, _>>()?;
        let one = |[gate, up, down]: &[TileShape; 3]| (gate.bytes() + up.bytes()).max(down.bytes());
        let bytes = shapes.iter().flatten().map(one).max().unwrap_or(0).max(SLAB_BYTES);
        let Some(upload) = R::upload(memory.client, memory.number, bytes)? else { return Ok(None) };
        let place = || {
            let buffer = memory.buffer(bytes, "experts from RAM")?;
            let address = upload.address(&buffer)?;
            Ok::<_, StageError>(Place { buffer, address })
        };
        let banks = [[place()?, place()?], [place()?, place()?]];
        Ok(Some(Self { upload, banks, shapes }))
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> u64 {
        self.banks.iter().flatten().map(|place| place.buffer.size()).sum()
    }

    /// Computes the experts in RAM of layer `index` for the rows of a pass, with all others of the layer computed or queued. The
    /// experts are in the order of their places in RAM.
    pub(super) fn compute<R: Platform>(
        &mut self,
        engine: &GpuEngine<R>,
        threads: &mut Threads,
        ram: &RamExperts,
        index: usize,
        in_ram: &[usize],
        count: usize,
    ) -> Result<(), StageError> {
        let missing = || failed("expected a layer with experts in RAM");
        let [gate, up, down] = self.shapes[index].ok_or_else(missing)?;
        let experts = engine.mixture(index).ok_or_else(missing)?;
        let activation = engine.recipe.layers[engine.options.layers.start + index].activation;
        let room = self.upload.slab_bytes();
        // No more than are on the device, so that pairs are sorted by expert here too.
        let most = (room / (gate.bytes() + up.bytes())).min(room / down.bytes()).clamp(1, experts.bank.down.count);
        let launch = |bank: &Bank| {
            engine.expert_gate_up(&engine.client, experts, bank, count);
            engine.gate_experts(&engine.client, experts, count, activation);
            engine.expert_outputs(&engine.client, experts, bank, count);
            engine.client.flush().map_err(failed)
        };
        let mut ready: Option<Bank> = None;
        for (round, first) in (0..in_ram.len()).step_by(most).enumerate() {
            let places = first..in_ram.len().min(first + most);
            let [inputs, outputs] = &self.banks[round % BANKS];
            // The bank may still be in use by the round before the last.
            cubecl::future::block_on(engine.client.sync()).map_err(failed)?;
            let some = places.len();
            let slab = self.upload.slab()?;
            let (gates, rest) = slab.split_at_mut(some * gate.bytes());
            ram.copy_tiles(threads, index, 0, places.clone(), gates);
            ram.copy_tiles(threads, index, 1, places.clone(), &mut rest[..some * up.bytes()]);
            self.upload.copy(some * (gate.bytes() + up.bytes()), &inputs.buffer, inputs.address)?;
            let slab = self.upload.slab()?;
            ram.copy_tiles(threads, index, 2, places.clone(), &mut slab[..some * down.bytes()]);
            self.upload.copy(some * down.bytes(), &outputs.buffer, outputs.address)?;
            // Both slabs were waited for, so the copies of the round before are complete.
            if let Some(bank) = ready.take() {
                launch(&bank)?;
            }
            let mut slots = vec![NO_SLOT; engine.config.experts.map_or(0, |experts| experts.count)];
            (0..).zip(&in_ram[places.clone()]).for_each(|(slot, expert)| slots[*expert] = slot);
            let slots = engine.upload(bytemuck::cast_slice(&slots));
            let bias = |matrices: &[usize]| {
                let of = |matrix: &usize| ram.biases(index, *matrix, places.clone());
                let all: Option<Vec<&[f32]>> = matrices.iter().map(of).collect();
                all.map(|all| engine.upload(bytemuck::cast_slice(&all.concat())))
            };
            let biases = bias(&[0, 1]).zip(bias(&[2])).map(|(inputs, outputs)| [inputs, outputs]);
            ready = Some(Bank {
                inputs: inputs_of(&inputs.buffer, gate, up, some),
                down: matrix_of(&outputs.buffer, down, 0, 1, some),
                biases,
                slots: Some(Slots { exact: slots.clone(), any: slots }),
            });
        }
        self.upload.finish()?;
        ready.as_ref().map_or(Ok(()), launch)
    }
}

/// Gates, then ups of `some` experts: as one matrix if they have one format.
fn inputs_of(buffer: &Handle, gate: TileShape, up: TileShape, some: usize) -> Vec<ExpertMatrix> {
    if (gate.kind, gate.rows) == (up.kind, up.rows) {
        return vec![matrix_of(buffer, gate, 0, 2, some)];
    }
    vec![matrix_of(buffer, gate, 0, 1, some), matrix_of(buffer, up, some * gate.bytes(), 1, some)]
}

/// `matrices` matrices of `some` experts, which begin at byte `start` of a buffer.
fn matrix_of(buffer: &Handle, shape: TileShape, start: usize, matrices: usize, some: usize) -> ExpertMatrix {
    let TileShape { kind, rows, cols } = shape;
    let unused = buffer.size() - (start + matrices * some * shape.bytes()) as u64;
    let tiles = buffer.clone().offset_start(start as u64).offset_end(unused);
    let matrix = Matrix { kind, rows: matrices * some * rows, cols, tiles };
    ExpertMatrix { matrix, first: 0, matrices, rows, count: some }
}
