//! Answers queries about simulations: here, by the member that coordinates the simulation, whose response is returned
//! unchanged, or from what this node knows of a run that it submitted before a restart.
use super::Submissions;
use super::checkpoints::newest_step;
use super::ledger::ListedRun;
use super::look::{JOB_CHARACTERS, QueryKind, SimulationQuery};
use super::report::{ReportContext, held_report, report};
use super::submission::Submission;
use crate::bulk::{BulkRequest, GridRequest};
use crate::report::{LostReport, Role, RunState, SimulationReport};
use bytes::Bytes;
use node_core::id::{JobId, NodeId};
use node_core::limits::SOURCES_MAX;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for a member's response; then the next one is asked, or the simulation counts as unknown.
const ANSWER_MAX: Duration = Duration::from_secs(3);
/// Largest response: an image, a report of 256 tiles, a screen of half blocks with their colours.
const ANSWER_BYTES_MAX: usize = 32 << 20;

/// Where a query was answered.
pub(crate) enum Answerer {
    /// This node coordinates the simulation.
    Here(Arc<Submission>),
    /// Another member responded.
    There(Bytes),
}

impl Submissions {
    /// This node's knowledge of simulations and of the nodes that compute them.
    pub(crate) async fn around(&self) -> ReportContext {
        ReportContext::new(self.node, self.driver.views().await)
    }

    /// The progress or the end of a simulation submitted here.
    pub(crate) fn report(&self, submission: &Submission, around: &ReportContext) -> SimulationReport {
        report(submission, around)
    }

    /// Reports on all simulations in which this node takes part: those it coordinates or did, then those whose tiles it
    /// holds, then those submitted here before a restart.
    pub(crate) async fn reports(&self, around: &ReportContext) -> Vec<SimulationReport> {
        let all = self.all();
        let own = all.iter().map(|submission| report(submission, around));
        // This node may have handed a job over and still compute tiles of it.
        let held = around.held().into_iter().filter(|job| !all.iter().any(|known| known.job == *job && !known.moved()));
        let mut reports: Vec<SimulationReport> = own.chain(held.map(|job| held_report(job, around))).collect();
        reports.extend(self.submitted_before(around).await);
        reports
    }

    /// A simulation submitted here, by its id or a unique prefix of it.
    pub(crate) fn named(&self, job: &str) -> Option<Arc<Submission>> {
        let known = u64::from_str_radix(job, 16).ok().filter(|_| job.len() == JOB_CHARACTERS);
        known.and_then(|job| self.find(JobId(job))).or_else(|| {
            let begins = |known: &Arc<Submission>| !job.is_empty() && format!("{:016x}", known.job.0).starts_with(job);
            let mut found: Vec<_> = self.all().into_iter().filter(begins).collect();
            if found.len() == 1 { found.pop() } else { None }
        })
    }

    /// Answers a query wherever the simulation is coordinated: here, at the coordinator of tiles on this node, or else
    /// at any member that knows it.
    pub(crate) async fn look(&self, look: &SimulationQuery, around: &ReportContext) -> Option<Answerer> {
        let own = self.named(&look.job);
        if let Some(submission) = own.clone().filter(|submission| !submission.moved()) {
            return Some(Answerer::Here(submission));
        }
        let there = self.look_elsewhere(look, around).await;
        // If the coordinator does not respond, report what this node has.
        let held = || around.held().into_iter().find(|job| look.names(*job)).map(|job| held_report(job, around));
        let known =
            there.or_else(|| held().filter(|_| look.sight == QueryKind::Report).map(|held| held.to_json().into()));
        known.map(Answerer::There).or(own.map(Answerer::Here))
    }

    async fn look_elsewhere(&self, look: &SimulationQuery, around: &ReportContext) -> Option<Bytes> {
        let held = around.held().into_iter().find(|job| look.names(*job));
        let coordinator = held.and_then(|job| around.coordinator_of(job));
        if let Some(coordinator) = coordinator.filter(|node| *node != self.node) {
            let asked = SimulationQuery { onward: false, ..look.clone() };
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

    async fn ask(&self, node: NodeId, look: SimulationQuery) -> Option<Bytes> {
        let endpoint = self.endpoint.get()?.clone();
        let asked = async move {
            let answer =
                endpoint.request(node.0, BulkRequest::Grid(GridRequest::Look(look)).encode().into()).await.ok()?;
            answer.all(ANSWER_BYTES_MAX).await.ok().map(Bytes::from)
        };
        tokio::time::timeout(ANSWER_MAX, asked).await.ok().flatten()
    }

    /// Answers another member's query. Blocks.
    pub(super) fn show(&self, look: &SimulationQuery) -> Result<Bytes, String> {
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
        let asked = SimulationQuery { onward: false, ..look.clone() };
        runtime.block_on(self.look_elsewhere(&asked, &around)).ok_or_else(unknown)
    }

    /// Reports on simulations submitted here before a restart, from the members that may have taken them over.
    async fn submitted_before(&self, around: &ReportContext) -> Vec<SimulationReport> {
        let mut found = Vec::new();
        for entry in self.ledger.entries() {
            if self.named(&entry.job).is_some() || around.holds(&entry.job) {
                continue;
            }
            let answer = match self.ledger.answered(&entry.job) {
                Some(answer) => answer,
                None => {
                    let answer = self.successor_report(&entry, around).await;
                    self.ledger.keep_answer(entry.job, answer.clone());
                    answer
                }
            };
            found.push(answer);
        }
        found
    }

    async fn successor_report(&self, entry: &ListedRun, around: &ReportContext) -> SimulationReport {
        let asked = match SimulationQuery::new(&entry.job, QueryKind::Report) {
            Some(look) => self.look(&look, around).await,
            None => None,
        };
        let there = match asked {
            Some(Answerer::There(answer)) => serde_json::from_slice::<SimulationReport>(&answer).ok(),
            Some(Answerer::Here(_)) | None => None,
        };
        if let Some(mut report) = there {
            report.set_role(Role::Submitter);
            return report;
        }
        let checkpoint = entry.out.as_deref().and_then(newest_step);
        let next = match checkpoint {
            Some(step) => format!("`submit --resume` continues from the checkpoint of step {step}"),
            None => "there is no checkpoint to resume from".into(),
        };
        SimulationReport::Lost(LostReport {
            job: entry.job.clone(),
            name: entry.name.clone(),
            state: RunState::Lost,
            role: Role::Submitter,
            out: entry.out.as_ref().map(|out| out.display().to_string()),
            checkpoint,
            error: format!(
                "this node restarted while it coordinated the job, and no reachable member has taken it over: {next}"
            ),
        })
    }
}

impl Submission {
    fn show(&self, sight: QueryKind, around: &ReportContext) -> Result<Bytes, String> {
        let with_step = |step: u32, bytes: &[u8]| Bytes::from([&step.to_le_bytes()[..], bytes].concat());
        let none = "there is no picture of this simulation yet: try again in a moment";
        match sight {
            QueryKind::Report => Ok(report(self, around).to_json().into()),
            QueryKind::Picture => self.picture().map(|(step, png)| with_step(step, &png)).ok_or_else(|| none.into()),
            QueryKind::Text(columns, lines) => self
                .text(columns.max(8).into(), lines.max(4).into())
                .map(|(step, text)| with_step(step, text.as_bytes()))
                .ok_or_else(|| none.into()),
        }
    }
}
