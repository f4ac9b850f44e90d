//! The requests that nodes send each other on bulk streams: one closed enum, encoded and decoded here, so that tags are
//! unique.
use crate::bans::exchange::Exchange;
use crate::states::StateName;
use crate::submissions::look::SimulationQuery;
use crate::transfer::request::WeightsRequest;
use kernels_grids::Region;
use node_core::id::{ContentId, JobId, PartId};
use node_core::work::steps::SaveKind;
use transport::Chain;

/// A request of one node to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BulkRequest {
    /// A part of a model's weights. Response: 1 and the bytes, or 0.
    Weights(ContentId, WeightsRequest),
    /// Renews a certificate; carries the present chain. Response: 1 and the new chain, or 0.
    Renewal(Chain),
    /// Exchanges the ban list and the mesh key.
    Bans(Exchange),
    /// Which models the node serves.
    Served,
    /// Data of a simulation. Response: its bytes, in blocks.
    Grid(GridRequest),
}

/// A request for data of a simulation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GridRequest {
    /// A saved state of a tile.
    State(StateName),
    /// The cells of a box, from the checkpoint at `step`.
    Checkpoint {
        /// The job.
        job: JobId,
        /// The step of the checkpoint.
        step: u32,
        /// The lowest x, y and z.
        start: [u64; 3],
        /// One past the highest x, y and z.
        end: [u64; 3],
    },
    /// A packed simulation.
    Simulation(ContentId),
    /// The progress of a simulation, or a preview of its field.
    Look(SimulationQuery),
}

impl GridRequest {
    /// Requests the cells of `region` from the checkpoint at `step`.
    pub(crate) fn checkpoint(job: JobId, step: u32, region: Region) -> Self {
        let (start, end) = (region.start.map(|at| at as u64), region.end.map(|at| at as u64));
        GridRequest::Checkpoint { job, step, start, end }
    }
}

/// First bytes of requests. Never reuse the tag of a request that was removed.
mod tag {
    pub(super) const INDEX: u8 = 1;
    pub(super) const CHUNK: u8 = 2;
    pub(super) const RENEWAL: u8 = 3;
    pub(super) const BANS: u8 = 4;
    pub(super) const HAVE: u8 = 5;
    pub(super) const SERVED: u8 = 7;
    pub(super) const STATE: u8 = 8;
    pub(super) const CHECKPOINT: u8 = 9;
    pub(super) const SIMULATION: u8 = 10;
    pub(super) const LOOK: u8 = 11;
}

impl BulkRequest {
    /// The encoded request: a tag, then its fields.
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            BulkRequest::Weights(content, what) => {
                let (tag, number) = match what {
                    WeightsRequest::Index => (tag::INDEX, 0),
                    WeightsRequest::Chunk(number) => (tag::CHUNK, *number),
                    WeightsRequest::Have => (tag::HAVE, 0),
                };
                [&[tag], content.0.as_slice(), &number.to_le_bytes()].concat()
            }
            BulkRequest::Renewal(chain) => [&[tag::RENEWAL], chain.encode().as_slice()].concat(),
            BulkRequest::Bans(exchange) => [&[tag::BANS], exchange.encode().as_slice()].concat(),
            BulkRequest::Served => vec![tag::SERVED],
            BulkRequest::Grid(request) => request.encode(),
        }
    }

    /// Decodes a request; `None` if it is malformed or of an unknown kind.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (&tag, rest) = bytes.split_first()?;
        match tag {
            tag::INDEX => weights(rest).map(|(content, _)| BulkRequest::Weights(content, WeightsRequest::Index)),
            tag::CHUNK => weights(rest).map(|(content, at)| BulkRequest::Weights(content, WeightsRequest::Chunk(at))),
            tag::HAVE => weights(rest).map(|(content, _)| BulkRequest::Weights(content, WeightsRequest::Have)),
            tag::RENEWAL => Chain::decode(rest).ok().map(BulkRequest::Renewal),
            tag::BANS => Exchange::decode(rest).map(BulkRequest::Bans),
            tag::SERVED => rest.is_empty().then_some(BulkRequest::Served),
            tag::STATE => state(rest).map(|name| BulkRequest::Grid(GridRequest::State(name))),
            tag::CHECKPOINT => checkpoint(rest).map(BulkRequest::Grid),
            tag::SIMULATION => {
                let content = ContentId(rest.try_into().ok()?);
                Some(BulkRequest::Grid(GridRequest::Simulation(content)))
            }
            tag::LOOK => SimulationQuery::decode(rest).map(|look| BulkRequest::Grid(GridRequest::Look(look))),
            _ => None,
        }
    }
}

impl GridRequest {
    fn encode(&self) -> Vec<u8> {
        match self {
            GridRequest::State(StateName { job, part, step, kind }) => {
                let (kind, number) = match kind {
                    SaveKind::Checkpoint => (0u16, 0),
                    SaveKind::Snapshot => (1, 0),
                    SaveKind::Output(number) => (2, *number),
                };
                let mut bytes = of_step(tag::STATE, *job, *step);
                [part.0, kind, number].iter().for_each(|value| bytes.extend(value.to_le_bytes()));
                bytes
            }
            GridRequest::Checkpoint { job, step, start, end } => {
                let mut bytes = of_step(tag::CHECKPOINT, *job, *step);
                start.iter().chain(end).for_each(|value| bytes.extend(value.to_le_bytes()));
                bytes
            }
            GridRequest::Simulation(content) => [&[tag::SIMULATION], content.0.as_slice()].concat(),
            GridRequest::Look(look) => [&[tag::LOOK], look.encode().as_slice()].concat(),
        }
    }
}

fn of_step(tag: u8, job: JobId, step: u32) -> Vec<u8> {
    [&[tag], job.0.to_le_bytes().as_slice(), &step.to_le_bytes()].concat()
}

/// Splits off a job and a step; returns the remaining bytes too.
fn job_and_step(bytes: &[u8]) -> Option<(JobId, u32, &[u8])> {
    let (job, rest) = bytes.split_first_chunk::<8>()?;
    let (step, rest) = rest.split_first_chunk::<4>()?;
    Some((JobId(u64::from_le_bytes(*job)), u32::from_le_bytes(*step), rest))
}

fn weights(bytes: &[u8]) -> Option<(ContentId, u32)> {
    let (content, rest) = bytes.split_first_chunk::<32>()?;
    Some((ContentId(*content), u32::from_le_bytes(rest.try_into().ok()?)))
}

fn state(bytes: &[u8]) -> Option<StateName> {
    let (job, step, rest) = job_and_step(bytes)?;
    let rest: &[u8; 6] = rest.try_into().ok()?;
    let [part, kind, number] = std::array::from_fn(|at| u16::from_le_bytes([rest[2 * at], rest[2 * at + 1]]));
    let kind = match kind {
        0 => SaveKind::Checkpoint,
        1 => SaveKind::Snapshot,
        2 => SaveKind::Output(number),
        _ => return None,
    };
    Some(StateName { job, part: PartId(part), step, kind })
}

fn checkpoint(bytes: &[u8]) -> Option<GridRequest> {
    let (job, step, rest) = job_and_step(bytes)?;
    let rest: &[u8; 48] = rest.try_into().ok()?;
    let (values, _) = rest.as_chunks::<8>();
    let at = |from: usize| std::array::from_fn(|axis| u64::from_le_bytes(values[from + axis]));
    Some(GridRequest::Checkpoint { job, step, start: at(0), end: at(3) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::submissions::look::QueryKind;
    use transport::{Identity, MeshCredentials};

    fn all() -> Vec<BulkRequest> {
        let content = ContentId([7; 32]);
        let weights = [WeightsRequest::Index, WeightsRequest::Chunk(70_000), WeightsRequest::Have];
        let job = JobId(u64::MAX);
        let state = |kind| GridRequest::State(StateName { job, part: PartId(3), step: 1 << 30, kind });
        let grids = [
            state(SaveKind::Checkpoint),
            state(SaveKind::Snapshot),
            state(SaveKind::Output(9)),
            GridRequest::Checkpoint { job, step: 4, start: [1, 2, 3], end: [4, 5, 6] },
            GridRequest::Simulation(content),
            GridRequest::Look(SimulationQuery::new("4f", QueryKind::Text(80, 24)).unwrap()),
        ];
        let chain = MeshCredentials::found(&Identity::generate(), 1).chain;
        let others = [BulkRequest::Renewal(chain), BulkRequest::Bans(Exchange::default()), BulkRequest::Served];
        let weights = weights.into_iter().map(|what| BulkRequest::Weights(content, what));
        weights.chain(others).chain(grids.into_iter().map(BulkRequest::Grid)).collect()
    }

    #[test]
    fn requests_round_trip_with_unique_tags() {
        let mut tags = std::collections::BTreeSet::new();
        for request in all() {
            let bytes = request.encode();
            assert_eq!(BulkRequest::decode(&bytes).as_ref(), Some(&request));
            let state = matches!(request, BulkRequest::Grid(GridRequest::State(_)));
            assert!(tags.insert(bytes[0]) || state, "{request:?}");
        }
    }

    #[test]
    fn truncated_oversized_and_unknown_requests_are_rejected() {
        for request in all() {
            let bytes = request.encode();
            for end in 0..bytes.len() {
                // A truncated job id is still a valid prefix of one.
                let read = BulkRequest::decode(&bytes[..end]);
                assert!(matches!(read, None | Some(BulkRequest::Grid(GridRequest::Look(_)))), "{end}: {read:?}");
            }
            let longer = [bytes.as_slice(), &[0]].concat();
            assert_eq!(BulkRequest::decode(&longer), None, "{request:?}");
        }
        for tag in [0, 6, 12, 255] {
            assert_eq!(BulkRequest::decode(&[&[tag], [9; 36].as_slice()].concat()), None, "{tag}");
        }
    }

    #[test]
    fn noise_is_decoded_without_a_panic() {
        let mut noise = blake3::Hasher::new().update(b"noise").finalize_xof();
        for length in 0..200 {
            for tag in 0..=12 {
                let mut bytes = vec![0; length + 1];
                noise.fill(&mut bytes);
                bytes[0] = tag;
                if let Some(request) = BulkRequest::decode(&bytes) {
                    let again = BulkRequest::decode(&request.encode());
                    assert_eq!(again.as_ref(), Some(&request));
                }
            }
        }
    }
}
