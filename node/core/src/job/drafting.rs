//! What a job and the job of its draft model say to each other: `Jobs` passes it on, because neither knows the other.
use super::Jobs;
use super::lifecycle::Job;
use super::output::{Drafting, JobOutput};
use crate::id::{ContentId, JobId};
use crate::time::Instant;

impl Jobs {
    /// Passes on a question, an answer, or the end of a request that needed drafts.
    pub(super) fn route_drafting(&mut self, now: Instant, drafting: Drafting) {
        let serves = |id: &JobId, of: JobId, job: &mut Job, content: ContentId| {
            *id != of && job.serve().is_some_and(|serve| serve.model.content == content)
        };
        match drafting {
            Drafting::Steer { job: of, request, content, steering } => {
                let mut jobs = self
                    .jobs
                    .iter_mut()
                    .filter_map(|(id, job)| serves(id, of, job, content).then(|| job.serve()).flatten());
                match jobs.find(|serve| serve.requests.is_placed()) {
                    Some(serve) => serve.requests.steer(now, (of, request), steering, &mut self.out),
                    None => {
                        let answer = Drafting::Answer { job: of, request, drafts: None };
                        self.out.push_back(JobOutput::Drafting(answer));
                    }
                }
            }
            // It may have been steered at several jobs in turn.
            Drafting::Leave { job: of, request, content } => {
                for (id, job) in &mut self.jobs {
                    if serves(id, of, job, content)
                        && let Some(serve) = job.serve()
                    {
                        serve.requests.leave(now, (of, request), &mut self.out);
                    }
                }
            }
            Drafting::Answer { job, request, drafts } => {
                if let Some(serve) = self.jobs.get_mut(&job).and_then(Job::serve) {
                    serve.requests.handle_drafts(now, request, drafts, &mut self.out);
                }
            }
        }
    }
}
