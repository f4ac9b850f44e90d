//! Queries about simulations that other members coordinate: each is forwarded to the coordinator, whose response is
//! returned unchanged.
use super::report::{Around, held_report, report};
use super::{Submission, Submissions};
use crate::bulk::{BulkRequest, GridRequest};
use bytes::Bytes;
use node_core::id::{JobId, NodeId};
use node_core::limits::SOURCES_MAX;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// Characters of a job's id.
const JOB_CHARACTERS: usize = 16;
/// Longest wait for a member's response; then the next one is asked, or the simulation counts as unknown.
const ANSWER_MAX: Duration = Duration::from_secs(3);
/// Largest response: an image, a report of 256 tiles, a screen of half blocks with their colours.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// Most columns and lines of a terminal.
const SCREEN_MAX: [u16; 2] = [1000, 500];

/// The kind of query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Its progress, as JSON.
    Report,
    /// Its picture: the step, then a PNG file.
    Picture,
    /// Its picture for a terminal of this number of columns and lines: the step, then text.
    Text(u16, u16),
}

/// A query about a simulation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// Its id in hexadecimal digits, or a prefix of it.
    pub job: String,
    /// The kind of query.
    pub sight: Sight,
    /// A node that does not coordinate the simulation may forward the query to the coordinator.
    pub onward: bool,
}

impl Look {
    /// `None` if `job` is not a prefix of a job id.
    pub fn new(job: &str, sight: Sight) -> Option<Self> {
        let digits = (1..=JOB_CHARACTERS).contains(&job.len()) && job.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| Look { job: job.to_ascii_lowercase(), sight, onward: true })
    }

    fn names(&self, job: JobId) -> bool {
        format!("{:016x}", job.0).starts_with(&self.job)
    }

    /// Encodes the bytes after the tag.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, [columns, lines]) = match self.sight {
            Sight::Report => (0u8, [0; 2]),
            Sight::Picture => (1, [0; 2]),
            Sight::Text(columns, lines) => (2, [columns, lines]),
        };
        let mut bytes = vec![u8::from(self.onward), kind];
        [columns, lines].iter().for_each(|number: &u16| bytes.extend(number.to_le_bytes()));
        bytes.extend(self.job.bytes().take(JOB_CHARACTERS));
        bytes
    }

    /// Decodes a query; `None` if it is malformed.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let ([onward, kind, a, b, c, d], job) = bytes.split_first_chunk::<6>()?;
        let job = std::str::from_utf8(job).ok()?;
        let (columns, lines) = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
        let sight = match kind {
            0 => Sight::Report,
            1 => Sight::Picture,
            2 => Sight::Text(columns.min(SCREEN_MAX[0]), lines.min(SCREEN_MAX[1])),
            _ => return None,
        };
        Look::new(job, sight).filter(|_| *onward < 2).map(|look| Look { onward: *onward == 1, ..look })
    }
}

/// Where a query was answered.
pub enum Found {
    /// This node coordinates the simulation.
    Here(Arc<Submission>),
    /// Another member responded.
    There(Bytes),
}

impl Submissions {
    /// This node's knowledge of simulations and of the nodes that compute them.
    pub async fn around(&self) -> Around {
        Around::new(self.node, self.driver.views().await)
    }

    /// The progress or the end of a simulation submitted here.
    pub fn report(&self, submission: &Submission, around: &Around) -> Value {
        report(submission, around)
    }

    /// Reports on all simulations in which this node takes part: those it coordinates or did, then those whose tiles it
    /// holds, then those submitted here before a restart.
    pub async fn reports(&self, around: &Around) -> Vec<Value> {
        let all = self.all();
        let own = all.iter().map(|submission| report(submission, around));
        // This node may have handed a job over and still compute tiles of it.
        let held = around.held().into_iter().filter(|job| !all.iter().any(|known| known.job == *job && !known.moved()));
        let mut reports: Vec<Value> = own.chain(held.map(|job| held_report(job, around))).collect();
        reports.extend(self.submitted_before(around).await);
        reports
    }

    /// A simulation submitted here, by its id or a unique prefix of it.
    pub fn named(&self, job: &str) -> Option<Arc<Submission>> {
        let known = u64::from_str_radix(job, 16).ok().filter(|_| job.len() == JOB_CHARACTERS);
        known.and_then(|job| self.find(JobId(job))).or_else(|| {
            let begins = |known: &Arc<Submission>| !job.is_empty() && format!("{:016x}", known.job.0).starts_with(job);
            let mut found: Vec<_> = self.all().into_iter().filter(begins).collect();
            if found.len() == 1 { found.pop() } else { None }
        })
    }

    /// Answers a query wherever the simulation is coordinated: here, at the coordinator of tiles on this node, or else
    /// at any member that knows it.
    pub async fn look(&self, look: &Look, around: &Around) -> Option<Found> {
        let own = self.named(&look.job);
        if let Some(submission) = own.clone().filter(|submission| !submission.moved()) {
            return Some(Found::Here(submission));
        }
        let there = self.look_elsewhere(look, around).await;
        // If the coordinator does not respond, report what this node has.
        let held = || around.held().into_iter().find(|job| look.names(*job)).map(|job| held_report(job, around));
        let known =
            there.or_else(|| held().filter(|_| look.sight == Sight::Report).map(|held| held.to_string().into()));
        known.map(Found::There).or(own.map(Found::Here))
    }

    async fn look_elsewhere(&self, look: &Look, around: &Around) -> Option<Bytes> {
        let held = around.held().into_iter().find(|job| look.names(*job));
        let coordinator = held.and_then(|job| around.coordinator_of(job));
        if let Some(coordinator) = coordinator.filter(|node| *node != self.node) {
            let asked = Look { onward: false, ..look.clone() };
            if let Some(answer) = self.ask(coordinator, asked).await {
                return Some(answer);
            }
        }
        if !look.onward {
            return None;
        }
        let members = self.endpoint.get()?.peers().into_iter().map(|peer| NodeId(peer.node)).take(SOURCES_MAX);
        let answers = members.map(|node| self.ask(node, look.clone()));
        futures::future::join_all(answers).await.into_iter().flatten().next()
    }

    async fn ask(&self, node: NodeId, look: Look) -> Option<Bytes> {
        let endpoint = self.endpoint.get()?.clone();
        let asked = async move {
            let answer =
                endpoint.request(node.0, BulkRequest::Grid(GridRequest::Look(look)).encode().into()).await.ok()?;
            answer.all(ANSWER_BYTES_MAX).await.ok().map(Bytes::from)
        };
        tokio::time::timeout(ANSWER_MAX, asked).await.ok().flatten()
    }

    /// Answers another member's query. Blocks.
    pub(super) fn show(&self, look: &Look) -> Result<Bytes, String> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|e| e.to_string())?;
        let around = runtime.block_on(self.around());
        let own = self.named(&look.job).filter(|submission| !submission.moved());
        if let Some(submission) = own {
            return submission.show(look.sight, &around);
        }
        let unknown = || format!("node {} has no part in the simulation {}", self.node, look.job);
        if !look.onward {
            return Err(unknown());
        }
        // Forward to the coordinator only: a node without a part in the simulation does not ask further members.
        let asked = Look { onward: false, ..look.clone() };
        runtime.block_on(self.look_elsewhere(&asked, &around)).ok_or_else(unknown)
    }
}

impl Submission {
    /// Whether another node coordinates it now, or this node gave it up.
    pub(super) fn moved(&self) -> bool {
        self.told().moved
    }

    fn show(&self, sight: Sight, around: &Around) -> Result<Bytes, String> {
        let with_step = |step: u32, bytes: &[u8]| Bytes::from([&step.to_le_bytes()[..], bytes].concat());
        let none = "there is no picture of this simulation yet: try again in a moment";
        match sight {
            Sight::Report => Ok(report(self, around).to_string().into()),
            Sight::Picture => self.picture().map(|(step, png)| with_step(step, &png)).ok_or_else(|| none.into()),
            Sight::Text(columns, lines) => self
                .text(columns.max(8).into(), lines.max(4).into())
                .map(|(step, text)| with_step(step, text.as_bytes()))
                .ok_or_else(|| none.into()),
        }
    }
}

/// Splits the response with a picture into the step and the rest.
pub fn with_step(answer: &Bytes) -> Option<(u32, Bytes)> {
    let step = answer.first_chunk::<4>()?;
    Some((u32::from_le_bytes(*step), answer.slice(4..)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_round_trip_and_malformed_ones_are_rejected() {
        for (job, sight) in [("4f", Sight::Report), ("0123456789abcdef", Sight::Picture), ("a", Sight::Text(80, 24))] {
            for onward in [false, true] {
                let look = Look { job: job.into(), sight, onward };
                assert_eq!(Look::decode(&look.encode()), Some(look));
            }
        }
        for bytes in
            [&b""[..], b"\x01\x00\0\0\0\0", b"\x01\x03\0\0\0\x004f", b"\x02\x00\0\0\0\x004f", b"\x01\x00\0\0\0\0xyz"]
        {
            assert_eq!(Look::decode(bytes), None, "{bytes:?}");
        }
        let wide = Look { job: "1".into(), sight: Sight::Text(u16::MAX, u16::MAX), onward: true };
        assert_eq!(Look::decode(&wide.encode()).unwrap().sight, Sight::Text(1000, 500));
    }
}
