//! Simulations that other members coordinate, looked at from here: each question goes to the coordinator, and comes back as it
//! would have been answered there.
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
/// How long a member may take to answer. Then the next one is asked, or the answer is that no member knows.
const ANSWER_MAX: Duration = Duration::from_secs(3);
/// Largest answer: a picture, a report of 256 tiles, a screen of half blocks with their colours.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// Columns and lines of a terminal at most.
const SCREEN_MAX: [u16; 2] = [1000, 500];

/// What of a simulation is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// How it stands, as JSON.
    Report,
    /// What it looks like: the step, then a PNG file.
    Picture,
    /// The same for a terminal of this number of columns and lines: the step, then text.
    Text(u16, u16),
}

/// A question about a simulation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// Its id in hexadecimal digits, or how that begins.
    pub job: String,
    /// What is wanted.
    pub sight: Sight,
    /// A node that does not coordinate the simulation may ask the coordinator.
    pub onward: bool,
}

impl Look {
    /// None if no job can have an id like that.
    pub fn new(job: &str, sight: Sight) -> Option<Self> {
        let digits = (1..=JOB_CHARACTERS).contains(&job.len()) && job.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| Look { job: job.to_ascii_lowercase(), sight, onward: true })
    }

    fn names(&self, job: JobId) -> bool {
        format!("{:016x}", job.0).starts_with(&self.job)
    }

    /// Bytes after the tag.
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

    /// What was sent; none if it is something else.
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

/// Where a simulation can be looked at.
pub enum Found {
    /// It was submitted to this node, or this node goes on with it.
    Here(Arc<Submission>),
    /// Another member answered.
    There(Bytes),
}

impl Submissions {
    /// What this node knows of simulations and of the nodes that compute them.
    pub async fn around(&self) -> Around {
        Around::new(self.node, self.driver.views().await)
    }

    /// How a simulation that was submitted here stands, or how it ended.
    pub fn report(&self, submission: &Submission, around: &Around) -> Value {
        report(submission, around)
    }

    /// All simulations in which this node has a part: those that it coordinates or did, then those of which it holds tiles, then
    /// those that were submitted here before a restart.
    pub async fn reports(&self, around: &Around) -> Vec<Value> {
        let all = self.all();
        let own = all.iter().map(|submission| report(submission, around));
        // It may have handed one over, and compute it still.
        let held = around.held().into_iter().filter(|job| !all.iter().any(|known| known.job == *job && !known.moved()));
        let mut reports: Vec<Value> = own.chain(held.map(|job| held_report(job, around))).collect();
        reports.extend(self.submitted_before(around).await);
        reports
    }

    /// A simulation that was submitted here, by its id or the beginning of that.
    pub fn named(&self, job: &str) -> Option<Arc<Submission>> {
        let known = u64::from_str_radix(job, 16).ok().filter(|_| job.len() == JOB_CHARACTERS);
        known.and_then(|job| self.find(JobId(job))).or_else(|| {
            let begins = |known: &Arc<Submission>| !job.is_empty() && format!("{:016x}", known.job.0).starts_with(job);
            let mut found: Vec<_> = self.all().into_iter().filter(begins).collect();
            if found.len() == 1 { found.pop() } else { None }
        })
    }

    /// Looks at a simulation wherever in the mesh it is coordinated: here, at the coordinator of tiles that are held here, or,
    /// where it has no part in it, at any member that knows.
    pub async fn look(&self, look: &Look, around: &Around) -> Option<Found> {
        let own = self.named(&look.job);
        if let Some(submission) = own.clone().filter(|submission| !submission.moved()) {
            return Some(Found::Here(submission));
        }
        let there = self.look_elsewhere(look, around).await;
        // The coordinator does not answer: what is known here.
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

    /// Answers another member. Blocks.
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
        // To its coordinator only: a node without a part in it asks no other member.
        let asked = Look { onward: false, ..look.clone() };
        runtime.block_on(self.look_elsewhere(&asked, &around)).ok_or_else(unknown)
    }
}

impl Submission {
    /// Another node coordinates it now, or this one let go of it.
    pub(super) fn moved(&self) -> bool {
        self.told().moved
    }

    fn show(&self, sight: Sight, around: &Around) -> Result<Bytes, String> {
        let with_step = |step: u32, bytes: &[u8]| Bytes::from([&step.to_le_bytes()[..], bytes].concat());
        let none = "no picture of this simulation has come yet";
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

/// The step and what follows it, of an answer with a picture.
pub fn with_step(answer: &Bytes) -> Option<(u32, Bytes)> {
    let step = answer.first_chunk::<4>()?;
    Some((u32::from_le_bytes(*step), answer.slice(4..)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_survive_the_way_and_nonsense_is_none() {
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
