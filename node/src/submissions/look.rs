//! A query about a simulation, which one member sends to another, and its encoding.
use bytes::Bytes;
use node_core::id::JobId;

/// Characters of a job's id.
pub(super) const JOB_CHARACTERS: usize = 16;
/// Most columns and lines of a terminal.
const SCREEN_MAX: [u16; 2] = [1000, 500];

/// The kind of query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueryKind {
    /// Its progress, as JSON.
    Report,
    /// Its picture: the step, then a PNG file.
    Picture,
    /// Its picture for a terminal of this number of columns and lines: the step, then text.
    Text(u16, u16),
}

/// A query about a simulation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SimulationQuery {
    /// Its id in hexadecimal digits, or a prefix of it.
    pub job: String,
    /// The kind of query.
    pub sight: QueryKind,
    /// A node that does not coordinate the simulation may forward the query to the coordinator.
    pub onward: bool,
}

impl SimulationQuery {
    /// `None` if `job` is not a prefix of a job id.
    pub(crate) fn new(job: &str, sight: QueryKind) -> Option<Self> {
        let digits = (1..=JOB_CHARACTERS).contains(&job.len()) && job.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| SimulationQuery { job: job.to_ascii_lowercase(), sight, onward: true })
    }

    /// Whether the query may be about this job.
    pub(super) fn names(&self, job: JobId) -> bool {
        format!("{:016x}", job.0).starts_with(&self.job)
    }

    /// Encodes the bytes after the tag.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (kind, [columns, lines]) = match self.sight {
            QueryKind::Report => (0u8, [0; 2]),
            QueryKind::Picture => (1, [0; 2]),
            QueryKind::Text(columns, lines) => (2, [columns, lines]),
        };
        let mut bytes = vec![u8::from(self.onward), kind];
        [columns, lines].iter().for_each(|number: &u16| bytes.extend(number.to_le_bytes()));
        bytes.extend(self.job.bytes().take(JOB_CHARACTERS));
        bytes
    }

    /// Decodes a query; `None` if it is malformed.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let ([onward, kind, a, b, c, d], job) = bytes.split_first_chunk::<6>()?;
        let job = std::str::from_utf8(job).ok()?;
        let (columns, lines) = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
        let sight = match kind {
            0 => QueryKind::Report,
            1 => QueryKind::Picture,
            2 => QueryKind::Text(columns.min(SCREEN_MAX[0]), lines.min(SCREEN_MAX[1])),
            _ => return None,
        };
        SimulationQuery::new(job, sight)
            .filter(|_| *onward < 2)
            .map(|look| SimulationQuery { onward: *onward == 1, ..look })
    }
}

/// Splits the response with a picture into the step and the rest.
pub(crate) fn with_step(answer: &Bytes) -> Option<(u32, Bytes)> {
    let step = answer.first_chunk::<4>()?;
    Some((u32::from_le_bytes(*step), answer.slice(4..)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_round_trip_and_malformed_ones_are_rejected() {
        for (job, sight) in
            [("4f", QueryKind::Report), ("0123456789abcdef", QueryKind::Picture), ("a", QueryKind::Text(80, 24))]
        {
            for onward in [false, true] {
                let look = SimulationQuery { job: job.into(), sight, onward };
                assert_eq!(SimulationQuery::decode(&look.encode()), Some(look));
            }
        }
        for bytes in
            [&b""[..], b"\x01\x00\0\0\0\0", b"\x01\x03\0\0\0\x004f", b"\x02\x00\0\0\0\x004f", b"\x01\x00\0\0\0\0xyz"]
        {
            assert_eq!(SimulationQuery::decode(bytes), None, "{bytes:?}");
        }
        let wide = SimulationQuery { job: "1".into(), sight: QueryKind::Text(u16::MAX, u16::MAX), onward: true };
        assert_eq!(SimulationQuery::decode(&wide.encode()).unwrap().sight, QueryKind::Text(1000, 500));
    }
}
