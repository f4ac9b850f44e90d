//! Explains why a model does not fit into the mesh: what holds the memory, and how much of the model would fit.
use super::model::ModelOptions;
use super::opened::{self, Opened};
use super::serving::name_of;
use super::{NodeHandle, PLAN_MAX};
use crate::config::Size;
use crate::error::NodeError;
use crate::hub::CallEvent;
use crate::report::ZoneView;
use crate::views::count;
use node_core::id::JobId;
use node_core::input::Input;
use node_core::output::Event;
use partitioner::zones::ZoneLoss;
use partitioner::{Fit, Fleet, Options, PlanError};
use std::fmt::Write;

/// A model that does not fit.
pub(super) struct Shortage<'a> {
    pub(super) name: &'a str,
    pub(super) requested: Fit,
    pub(super) error: &'a PlanError,
    pub(super) fleet: &'a Fleet,
    /// A context and a number of requests that would fit.
    pub(super) fit: Option<Fit>,
    /// Jobs that hold memory, largest first.
    pub(super) holders: &'a [Holder],
}

/// A job that holds memory, and how to free it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) what: String,
    pub(super) bytes: u64,
    pub(super) free_with: String,
}

/// Most holders listed: ending the largest frees most.
const HOLDERS_MAX: usize = 4;

impl Shortage<'_> {
    /// A human-readable report, one fact per line.
    pub(super) fn text(&self) -> String {
        let Fit { context, sequences } = self.requested;
        let mut text =
            format!("{} does not fit with --context {context} --sequences {sequences}: {}", self.name, self.error);
        let usable = self.fleet.devices.iter().filter(|device| !device.excluded);
        let (free, nodes) = usable.fold((0u64, 0), |(sum, n), device| (sum.saturating_add(device.memory), n + 1));
        let nodes = count(nodes, "node");
        let _ = write!(text, "\n  memory: {} free on {nodes}", Size(free));
        for holder in self.holders.iter().take(HOLDERS_MAX) {
            let _ = write!(text, "\n  {} holds {}: {}", holder.what, Size(holder.bytes), holder.free_with);
        }
        let _ = match self.fit {
            Some(fit) => write!(text, "\n  it fits with: --context {} --sequences {}", fit.context, fit.sequences),
            None => write!(text, "\n  no shorter context fits: more memory is needed"),
        };
        text
    }
}

impl NodeHandle {
    /// Explains a failed plan to the user: a full report if memory is short, else `None`.
    pub(super) async fn explain(
        &self,
        opened: &Opened,
        spec: &node_core::work::serve::ModelSpec,
        served: Option<JobId>,
    ) -> Option<NodeError> {
        let (fleet, options) = self.survey(served).await?;
        let (file, int8) = (opened.held.file.clone(), spec.int8);
        let requested = Fit { context: spec.work.context, sequences: spec.work.sequences };
        let work = spec.work.clone();
        let question = (fleet.clone(), options.clone());
        let (error, fit) = tokio::task::spawn_blocking(move || {
            let (fleet, options) = question;
            let error = partitioner::plan(&work, &fleet, &options).err()?;
            let at = |fit: Fit| {
                let (context, sequences) = (Some(fit.context), Some(fit.sequences));
                let options = ModelOptions { int8: Some(int8), context, sequences, ..ModelOptions::default() };
                opened::work(&file, &options)
            };
            let fit = partitioner::largest_fit(requested, at, &fleet, &options).map(|fit| Fit {
                context: fit.context - fit.context % CONTEXT_STEP, // a round number that leaves a little memory free
                ..fit
            });
            Some((error, fit))
        })
        .await
        .ok()??;
        match error {
            PlanError::Memory { .. } | PlanError::LayerTooLarge { .. } | PlanError::Packing { .. } => {}
            PlanError::NoDevices | PlanError::Unlinked | PlanError::Invalid(_) => return None,
        }
        let holders = self.holders(served).await;
        let shortage = Shortage { name: &opened.name, requested, error: &error, fleet: &fleet, fit, holders: &holders };
        Some(NodeError::Plan(shortage.text()))
    }

    /// The fleet in the planner's input; the memory that `job` holds counts as free.
    pub(super) async fn survey(&self, job: Option<JobId>) -> Option<(Fleet, Options)> {
        let (call, mut events) = self.inner.hub.open(8);
        self.inner.driver.input(Input::Survey { call, job });
        let answer = tokio::time::timeout(PLAN_MAX, async {
            loop {
                match events.recv().await? {
                    CallEvent::Node(Event::Fleet { fleet, options, .. }) => return Some((*fleet, options)),
                    CallEvent::Node(_) => {}
                }
            }
        })
        .await;
        self.inner.hub.forget(call);
        answer.ok().flatten()
    }

    /// What the loss of each zone would mean for a plan. Computed on a blocking thread.
    pub(super) async fn zone_losses(
        &self,
        job: Option<JobId>,
        losses: impl FnOnce(&Fleet, &Options) -> Vec<ZoneLoss> + Send + 'static,
    ) -> Vec<ZoneView> {
        let Some((fleet, options)) = self.survey(job).await else { return Vec::new() };
        let found = tokio::task::spawn_blocking(move || losses(&fleet, &options)).await;
        found.unwrap_or_default().into_iter().map(ZoneView::from).collect()
    }

    /// The jobs that hold memory in the mesh, as far as this node has heard, except job `but`.
    async fn holders(&self, but: Option<JobId>) -> Vec<Holder> {
        let views = self.inner.driver.views().await;
        let but = but.map(name_of);
        let models = views.jobs.iter().filter(|job| Some(&job.job) != but.as_ref()).map(|job| {
            let whose = if job.head { String::new() } else { format!(" on {}", job.coordinator) };
            Holder {
                what: format!("the model {}", job.model),
                bytes: job.stages.iter().map(|stage| stage.bytes).sum(),
                free_with: format!("`meshnode serve {} --stop`{whose} frees it", job.model),
            }
        });
        let simulations = views.grids.iter().map(|job| Holder {
            what: format!("the simulation {}", job.name),
            bytes: job.parts.iter().filter_map(|part| part.bytes).sum(),
            free_with: format!("`meshnode cancel {:016x}` frees it", job.job.0),
        });
        let mut holders: Vec<Holder> = models.chain(simulations).filter(|holder| holder.bytes > 0).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        holders
    }
}

/// Proposed contexts are multiples of this.
const CONTEXT_STEP: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use partitioner::{Device, DeviceId, Link};
    use std::collections::BTreeMap;

    fn fleet(memories: &[u64]) -> Fleet {
        let device = |(at, &memory): (usize, &u64)| Device {
            id: DeviceId::first([at as u8; 16]),
            name: format!("n{at}"),
            label: String::new(),
            machine: at as u64,
            zone: String::new(),
            memory,
            bytes_per_second: 1,
            flops_per_second: 1,
            copy_bytes_per_second: 1,
            step_ns: 1,
            layer_ns: 1,
            cache_bytes_per_second: 1,
            ram: 0,
            ram_bytes_per_second: 0,
            ram_flops_per_second: 0,
            numerics: 1,
            pass_steps: 1,
            excluded: false,
        };
        let default_link = Link { rtt_ns: 1, bytes_per_second: 1 };
        Fleet { devices: memories.iter().enumerate().map(device).collect(), links: BTreeMap::new(), default_link }
    }

    #[test]
    fn a_shortage_names_the_memory_holders_and_what_would_fit() {
        let fleet = fleet(&[120 << 20; 3]);
        let error = PlanError::Memory { need: 422_356_224, offered: 339_738_624, ram: 0, missing: 82_617_600 };
        let holders = [
            Holder {
                what: "the model b".into(),
                bytes: 50 << 20,
                free_with: "`meshnode serve b --stop` frees it".into(),
            },
            Holder {
                what: "the simulation karman".into(),
                bytes: 1 << 20,
                free_with: "`meshnode cancel 0f` frees it".into(),
            },
        ];
        let mut shortage = Shortage {
            name: "smollm2-135m",
            requested: Fit { context: 2048, sequences: 4 },
            error: &error,
            fleet: &fleet,
            fit: Some(Fit { context: 1344, sequences: 4 }),
            holders: &holders,
        };
        let text = shortage.text();
        for words in [
            "smollm2-135m does not fit with --context 2048 --sequences 4",
            "needs 402.8 MiB",
            "78.8 MiB are missing",
            "360.0 MiB free on 3 nodes",
            "the model b holds 50.0 MiB: `meshnode serve b --stop` frees it",
            "the simulation karman holds 1.0 MiB: `meshnode cancel 0f` frees it",
            "it fits with: --context 1344 --sequences 4",
        ] {
            assert!(text.contains(words), "{words} in:\n{text}");
        }
        shortage.fit = None;
        assert!(shortage.text().contains("more memory is needed"));
    }
}
