//! The frames that a part of this node receives, which the data plane accepts.
use crate::device_thread::tiles::dtype;
use crate::rows;
use kernels::boundary::Codec;
use node_core::id::PartId;
use node_core::limits::CHUNK_POSITIONS_MAX;
use node_core::work::serve::StageOrder;
use node_core::work::steps::TileOrder;
use partitioner::tiles::Block;
use transport::frame::{Expectation, PAYLOAD_BYTES_MAX};

/// The frames that a stage receives: tokens for the first stage, hidden rows for later stages.
pub(super) fn hidden_rows(order: &StageOrder, part: PartId) -> Expectation {
    if order.layers_of(part).start == 0 {
        Expectation::tokens(CHUNK_POSITIONS_MAX)
    } else {
        let codec = rows::codec(order.row.codec);
        // Of encoded rows an element is a byte.
        let width = if codec == Codec::Lossless { order.width } else { order.row.bytes };
        Expectation::hidden(rows::dtype(codec), width, CHUNK_POSITIONS_MAX)
    }
}

/// The frames that a tile receives: a halo is at most the whole ring around the tile, or what a frame holds.
pub(super) fn halos(order: &TileOrder, part: PartId) -> Expectation {
    let reach = u64::from(order.depth) * u64::from(order.work.radius);
    let block: &Block = order.block(part);
    let grown = (0..3).fold(1u128, |cells, axis| {
        let extent = block.extent(axis);
        let ring = if extent < order.work.size[axis] { 2 * reach } else { 0 };
        cells * u128::from(extent + ring)
    });
    let halo = grown - u128::from(block.cells());
    // Rows of bits are padded to whole bytes.
    let bits = order.work.cell_bits.max(8);
    let bytes = (halo * u128::from(bits) / 8).clamp(64, PAYLOAD_BYTES_MAX as u128) as u32;
    let dtype = dtype(order.work.cell_bits);
    Expectation::halo_strips(dtype, bytes / dtype.bytes() as u32)
}
