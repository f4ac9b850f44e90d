//! The commands of a device thread.
use crate::residency::Key;
use kernels::boundary::Codec;
use kernels_grids::Region;
use kernels_models::stage::Stage;
use kernels_models::weights::ModelFile;
use kernels_simulations::Simulation;
use node_core::id::{Epoch, JobId, LoadId, RequestId};
use node_core::work::Run;
use node_core::work::steps::TileOrder;
use partitioner::Tier;
use std::sync::{Arc, mpsc};

/// A command for a device thread.
pub(crate) enum Command {
    /// Hold a part from now on.
    Load {
        /// The part's key.
        key: Key,
        /// The epoch it was loaded for.
        epoch: Epoch,
        /// The order that this answers.
        load: LoadId,
        /// Memory that the plan grants it; a stage's caches grow up to that as they are used.
        bytes_max: u64,
        /// The part.
        part: NewPart,
    },
    /// Some cells of a tile's initial state, computed or fetched on another thread.
    Cells {
        /// The tile.
        key: Key,
        /// The order they belong to.
        load: LoadId,
        /// The box they fill.
        part: Region,
        /// The cells, in the layout of a saved state.
        cells: Vec<u8>,
    },
    /// The initial state is complete, or failed.
    CellsEnd {
        /// The tile.
        key: Key,
        /// The order that this answers.
        load: LoadId,
        /// The reason, if it failed.
        result: Result<(), String>,
    },
    /// Restore a tile from a snapshot in [`States`](crate::states::States).
    Restore {
        /// The tile.
        key: Key,
        /// The order that this answers.
        load: LoadId,
        /// The snapshot's step.
        step: u32,
    },
    /// Keep a part under another epoch.
    Keep {
        /// The part.
        key: Key,
        /// The epoch from now on.
        epoch: Epoch,
        /// Encoding of a stage's rows from now on.
        rows: Codec,
    },
    /// Compute. A stage loaded for another epoch rejects it.
    Run(Box<Run>),
    /// Free a request's cache.
    Release {
        /// The stage.
        key: Key,
        /// The request.
        request: RequestId,
    },
    /// Give a request the cache of the first positions of another.
    Fork {
        /// The stage.
        key: Key,
        /// The request that has them.
        from: RequestId,
        /// The request that gets them.
        to: RequestId,
        /// Their number.
        positions: u32,
    },
    /// Numerics challenge: run the stage on rows generated from a nonce and report a digest.
    Challenge {
        /// The stage.
        key: Key,
        /// The epoch it belongs to.
        epoch: Epoch,
        /// Seed of the rows.
        nonce: u64,
    },
    /// Drop a part and its saved states, if it is here.
    Drop {
        /// The part.
        key: Key,
    },
    /// Drop a part, which another device of this node holds now, with its saved states.
    Vacate {
        /// The part.
        key: Key,
    },
    /// Drop all parts of a job.
    Unload {
        /// The job.
        job: JobId,
        /// No other device holds parts of it: what is saved of the job can go too.
        alone: bool,
    },
    /// A device has reached the mark of a launched run.
    MarkReached,
}

/// A part to hold.
pub(crate) enum NewPart {
    /// A stage, already loaded on another thread.
    Stage {
        /// The stage.
        stage: Box<dyn Stage>,
        /// Its model, if it draws tokens: grammars need the vocabulary.
        file: Option<Arc<ModelFile>>,
        /// Encoding of the rows that it makes.
        rows: Codec,
        /// Bytes of its experts in RAM.
        ram: u64,
    },
    /// A tile, which the device thread creates.
    Tile {
        /// The coordinator's order.
        order: Box<TileOrder>,
        /// The standby tier, if it is a standby.
        standby: Option<Tier>,
        /// The simulation to compute.
        simulation: Arc<Simulation>,
        /// Source of the checkpoint's cells, if the tile starts from one.
        checkpoint: Option<CellSource>,
    },
}

/// Returns the cells of a box, in the layout of a saved state. Blocks.
pub(crate) type CellSource = Box<dyn Fn(Region) -> Result<Vec<u8>, String> + Send>;

/// Sends commands to the thread.
pub(crate) type Commands = Arc<mpsc::Sender<Command>>;
