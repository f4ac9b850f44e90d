//! A request waits at most one second for its next token after the loss of a stage with a current standby, of two such stages, or of
//! all connections, if nothing else goes wrong at that time.
//!
//! Events are recorded as they happen and evaluated at the end: a loss counts only if the time around it was quiet.
use crate::faults::Fault;
use crate::host::HostId;
use crate::world::Observer;
use node_core::id::{CallId, NodeId};
use node_core::input::Input;
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use node_core::work::Placement;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Records losses, standbys and tokens. Clones share the record.
#[derive(Clone, Default)]
pub struct Pauses {
    seen: Rc<RefCell<Vec<(Instant, HostId, Seen)>>>,
}

enum Seen {
    /// Processes died, and nothing else.
    Loss(Vec<HostId>),
    /// A connection broke, and nothing else.
    Broken,
    /// Some other fault is active until then.
    Trouble(Instant),
    /// Nodes of the stages, first to last.
    Placed(Vec<NodeId>),
    Ready,
    /// A stage's standby holds what the stage holds.
    Current(u16, NodeId),
    Token(CallId),
    Ended(CallId),
    /// A caller went away, or a request came.
    Changed,
}

/// A loss after which requests must go on within [`LIMIT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// When the first process died.
    pub at: Instant,
    /// When the last one did.
    pub last: Instant,
    /// Owners of stages among the dead; 0 where connections broke.
    pub owners: usize,
    /// Longest wait of a running request for its next token, from the last death on.
    pub waited: Duration,
}

impl Pauses {
    /// Every loss that [`LIMIT`] applies to. `node` maps hosts to nodes.
    pub fn losses(&self, node: impl Fn(HostId) -> NodeId) -> Vec<Loss> {
        let seen = self.seen.borrow();
        let mut story = Story::default();
        let mut losses = Vec::new();
        for (index, (at, host, entry)) in seen.iter().enumerate() {
            let dead: Option<Vec<NodeId>> = match entry {
                Seen::Loss(hosts) => Some(hosts.iter().map(|host| node(*host)).collect()),
                Seen::Broken => Some(Vec::new()),
                Seen::Trouble(_)
                | Seen::Placed(_)
                | Seen::Ready
                | Seen::Current(..)
                | Seen::Token(_)
                | Seen::Ended(_)
                | Seen::Changed => None,
            };
            let after = &seen[index + 1..];
            let applies = dead.and_then(|dead| story.applies(*at, &dead, after, &node));
            if let Some((last, owners)) = applies {
                let waited = story.waited(*at, last, after);
                losses.extend(waited.map(|waited| Loss { at: *at, last, owners, waited }));
            }
            story.apply(*at, *host, entry, &node);
        }
        losses
    }
}

/// State of the job up to an event.
#[derive(Default)]
struct Story {
    /// The coordinator.
    head: Option<HostId>,
    owners: Vec<NodeId>,
    ready: bool,
    current: BTreeMap<u16, NodeId>,
    /// Until when another fault is active.
    trouble: Option<Instant>,
    /// When a request came or went.
    changed: Option<Instant>,
    /// When each running request had its last token.
    tokens: BTreeMap<CallId, Instant>,
}

impl Story {
    fn apply(&mut self, at: Instant, host: HostId, entry: &Seen, node: &impl Fn(HostId) -> NodeId) {
        match entry {
            Seen::Loss(hosts) => {
                self.trouble = self.trouble.max(Some(at));
                if self.head.is_some_and(|head| hosts.contains(&head)) {
                    *self = Story { trouble: self.trouble, ..Story::default() };
                }
                let dead: BTreeSet<NodeId> = hosts.iter().map(|host| node(*host)).collect();
                self.current.retain(|_, standby| !dead.contains(standby));
            }
            Seen::Broken => self.trouble = self.trouble.max(Some(at)),
            Seen::Trouble(until) => self.trouble = self.trouble.max(Some(*until)),
            Seen::Placed(owners) => {
                (self.head, self.owners, self.ready) = (Some(host), owners.clone(), false);
                self.current.clear();
            }
            Seen::Ready => self.ready = true,
            Seen::Current(stage, standby) => _ = self.current.insert(*stage, *standby),
            Seen::Token(call) => _ = self.tokens.insert(*call, at),
            Seen::Ended(call) => _ = self.tokens.remove(call),
            Seen::Changed => self.changed = Some(at),
        }
    }

    /// Whether [`LIMIT`] applies to this loss together with a second one that may follow: the time of the last death, and the number
    /// of owners that die.
    fn applies(
        &self,
        at: Instant,
        dead: &[NodeId],
        after: &[(Instant, HostId, Seen)],
        node: &impl Fn(HostId) -> NodeId,
    ) -> Option<(Instant, usize)> {
        let quiet = self.trouble.is_none_or(|until| until + QUIET < at)
            && self.changed.is_none_or(|changed| changed + SETTLES < at);
        if !quiet || !self.ready {
            return None;
        }
        let (mut all, mut last) = (dead.to_vec(), at);
        for (then, _, entry) in after {
            if *then > last + LIMIT {
                break;
            }
            match entry {
                Seen::Loss(hosts) => {
                    all.extend(hosts.iter().map(|host| node(*host)));
                    last = *then;
                }
                Seen::Trouble(_) => return None,
                Seen::Broken if dead.is_empty() => {}
                Seen::Broken => return None,
                Seen::Changed | Seen::Placed(_) | Seen::Ready | Seen::Current(..) | Seen::Token(_) | Seen::Ended(_) => {
                }
            }
        }
        let head = self.head.map(node)?;
        let lost: Vec<u16> =
            (0..).zip(&self.owners).filter(|(_, owner)| all.contains(owner)).map(|(at, _)| at).collect();
        let covered = |stage: &u16| self.current.get(stage).is_some_and(|standby| !all.contains(standby));
        let noticed = !lost.is_empty() || dead.is_empty();
        let passes = !all.contains(&head) && all.len() <= 2 && noticed && lost.iter().all(covered);
        passes.then_some((last, lost.len()))
    }

    /// The longest wait of a running request; `None` if no request was running.
    fn waited(&self, at: Instant, last: Instant, after: &[(Instant, HostId, Seen)]) -> Option<Duration> {
        // A request that ended before the last loss did not wait for it.
        let over = |call: &CallId| {
            let mut between = after.iter().take_while(|(then, ..)| *then <= last);
            between.any(|(_, _, entry)| matches!(entry, Seen::Ended(of) if of == call))
        };
        let running = self.tokens.iter().filter(|(_, token)| **token + RUNNING > at).map(|(call, _)| *call);
        let running = running.filter(|call| !over(call));
        running
            .map(|call| {
                let next = after.iter().find(|(then, _, entry)| {
                    let of = matches!(entry, Seen::Token(of) | Seen::Ended(of) if *of == call);
                    *then > last && of
                });
                next.map_or(Duration::MAX, |(then, ..)| then.since(last))
            })
            .max()
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker looks at few of many things")]
impl Observer for Pauses {
    fn input(&mut self, at: Instant, host: HostId, input: &Input) {
        let entry = match input {
            Input::Submit { .. } | Input::Cancel { .. } => Seen::Changed,
            _ => return,
        };
        self.seen.borrow_mut().push((at, host, entry));
    }

    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let Output::Notify(event) = output else { return };
        let entry = match event {
            Event::JobPlaced { placement, .. } => match &**placement {
                Placement::Stages(stages) => Seen::Placed(stages.iter().map(|(node, _)| *node).collect()),
                Placement::Tiles { .. } => return,
            },
            Event::JobReady { .. } => Seen::Ready,
            Event::Standby { part, node, current: true, .. } => Seen::Current(part.0, *node),
            Event::Token { call, .. } => Seen::Token(*call),
            // Other checkers look at the reason.
            Event::Done { call, .. } => Seen::Ended(*call),
            _ => return,
        };
        self.seen.borrow_mut().push((at, host, entry));
    }

    fn fault(&mut self, at: Instant, fault: &Fault) {
        let entry = match fault {
            Fault::Crash(host) => Seen::Loss(vec![*host]),
            Fault::Outage { hosts, .. } => Seen::Loss(hosts.clone()),
            Fault::Break(..) => Seen::Broken,
            // A restart delays no request, and an ambush is recorded as the outage that it causes.
            Fault::Restart { .. } | Fault::Ambush { .. } => return,
            other => Seen::Trouble(at + other.lasts()),
        };
        self.seen.borrow_mut().push((at, HostId(0), entry));
    }
}

/// Longest wait: a lease of 340 ms, a promotion, and the positions that the standby is behind.
pub const LIMIT: Duration = Duration::from_secs(1);
/// Time without another fault before a loss.
const QUIET: Duration = Duration::from_secs(5);
/// Time without a new or cancelled request before a loss: standbys follow a long prompt with some delay.
const SETTLES: Duration = Duration::from_secs(1);
/// A request counts as running if its last token is no older than this.
const RUNNING: Duration = Duration::from_secs(1);
