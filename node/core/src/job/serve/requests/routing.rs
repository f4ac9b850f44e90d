//! Requests between the replicas of a model: which one has the least to do, and what one gives to another.
use super::super::stream::{Caller, Stream};
use super::{Requests, done};
use crate::id::CallId;
use crate::job::output::Out;
use crate::limits::{QUEUE_MAX, SEQUENCES_MAX};
use crate::time::Instant;
use crate::work::serve::DoneReason;
use alloc::vec::Vec;

/// What a new request would cost at a replica, in 1024ths of a request: those that run and wait there, and the new one,
/// less what is cached of its prompt.
const REQUEST: u64 = 1024;
/// A cached prompt outweighs this number of other requests: they share each pass over the weights, but all of the prompt would
/// have to be computed again.
const CACHED_REQUESTS: u64 = 4;

impl Requests {
    /// What a request with this prompt adds to, in 1024ths of a request.
    pub(in crate::job) fn load(&self, prompt: &[u32]) -> u64 {
        let running = self.running.values().map(|stream| (stream.id, stream.acked_tokens()));
        let shared = self.cache.longest(prompt, running).map_or(0, |(_, shared)| u64::from(shared));
        let cached = CACHED_REQUESTS * REQUEST * shared / (prompt.len() as u64).max(1);
        let (running, waiting) = self.counts();
        let requests = (running + waiting) as u64 + 1;
        // At least 1, so that of two idle replicas the faster one is used.
        ((CACHED_REQUESTS + requests) * REQUEST).saturating_sub(cached).max(1)
    }

    /// Gives up all requests for another replica. Their caches are freed here.
    pub(in crate::job) fn give_away(&mut self, out: &mut Out) -> Vec<Stream> {
        self.stop_refresh(out);
        self.end_drafting(out);
        let mut streams = Vec::new();
        for (id, stream) in core::mem::take(&mut self.running) {
            self.cache.forget(id);
            self.close(id, out);
            self.log_over(&stream);
            streams.push(stream);
        }
        for stream in core::mem::take(&mut self.waiting) {
            self.log_over(&stream);
            streams.push(stream);
        }
        streams
    }

    /// Continues requests of another replica, from their tokens. Those beyond the bound of the queue are rejected. Returns
    /// the calls of this node's callers.
    pub(in crate::job) fn take_over(&mut self, now: Instant, streams: Vec<Stream>, out: &mut Out) -> Vec<CallId> {
        let mut calls = Vec::new();
        for mut stream in streams {
            // One that has sent tokens may use the room of preempted requests.
            let bound = if stream.is_untouched() { QUEUE_MAX } else { QUEUE_MAX + SEQUENCES_MAX as usize };
            if self.waiting.len() >= bound {
                done(stream.caller, DoneReason::Busy, 0, out);
                continue;
            }
            if let Caller::Here(call) = stream.caller {
                calls.push(call);
            }
            stream.preempt(self.next_id());
            stream.rank = stream.id.0;
            self.enqueue(stream);
        }
        self.stop_refresh(out);
        self.log_soon(now);
        self.fill_slots(now, out);
        calls
    }
}
