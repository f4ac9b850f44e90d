//! Serves models, replaces and stops them, and plans them.
use super::demand::DeployMode;
use super::model::{ModelHandle, ModelOptions, ModelRef};
use super::opened::{CONTEXT_DEFAULT, Opened};
use super::remembered::RememberedModel;
use super::serving::{Unserved, name_of};
use super::{Inner, NodeHandle, PLAN_MAX};
use crate::error::NodeError;
use crate::hub::CallEvent;
use crate::rows::Boundary;
use crate::views::{PlanReport, plan_report};
use node_core::id::ContentId;
use node_core::input::Input;
use node_core::output::Event;
use node_core::work::PlanSpec;
use node_core::work::serve::ModelSpec;
use partitioner::{Fleet, Options};

impl NodeHandle {
    /// Serves a model: plans, places and loads it, and waits until every stage is ready. A job that already runs the
    /// model with these options is reused; one with other options is replaced, and its requests end with an error.
    /// Dropping the returned future does not stop the deployment. After a restart the node serves the model again,
    /// until [`Self::undeploy`].
    ///
    /// # Errors
    /// An unknown or damaged model, a mesh too small for it (with what would fit), or a stage that failed to load.
    pub(crate) async fn deploy(&self, model: ModelRef, options: ModelOptions) -> Result<ModelHandle, NodeError> {
        self.deploy_for(model, options, false).await
    }

    /// Like [`Self::deploy`], but the model is unloaded a few seconds after its last request ends, and is not served
    /// again after a restart. A permanently served model stays permanent.
    ///
    /// # Errors
    /// As for [`Self::deploy`].
    pub(crate) async fn deploy_temporarily(
        &self,
        model: ModelRef,
        options: ModelOptions,
    ) -> Result<ModelHandle, NodeError> {
        self.deploy_for(model, options, true).await
    }

    async fn deploy_for(
        &self,
        model: ModelRef,
        options: ModelOptions,
        temporary: bool,
    ) -> Result<ModelHandle, NodeError> {
        let node = self.clone();
        let deploying =
            tokio::spawn(async move { node.deploy_in_turn(model, DeployMode::Requested { options, temporary }).await });
        deploying.await.unwrap_or_else(|e| Err(NodeError::Failed(format!("serving the model was interrupted: {e}"))))
    }

    /// Serves a model when no other change of the served models is in progress.
    pub(super) async fn deploy_in_turn(&self, model: ModelRef, mode: DeployMode) -> Result<ModelHandle, NodeError> {
        self.takes_work()?;
        let serving = &self.inner.serving;
        let _turn = serving.turn().await;
        let entry = match mode {
            DeployMode::Requested { .. } => None,
            DeployMode::OnDemand { .. } | DeployMode::AfterRestart => self.inner.remembered.get(&model.0),
        };
        if matches!(mode, DeployMode::AfterRestart)
            && let Some(served) = serving.by_name(&model.0)
        {
            return Ok(served);
        }
        let opened = match &entry {
            Some(entry) => self.open_remembered(entry).await?,
            // It was undeployed while this call waited for its turn.
            None if matches!(mode, DeployMode::AfterRestart) => {
                return Err(NodeError::NotFound(format!(
                    "{} was stopped and is not served again after the restart",
                    model.0
                )));
            }
            None => self.open(&model).await?,
        };
        let before = serving.find(&opened.name, opened.held.content);
        let options = self.options(&mode, entry.as_ref(), &opened)?;
        let options = match &before {
            Some(before) => options.or(&before.options()),
            None => self.with_context(options, &opened).await,
        };
        let mut spec = opened.spec(&options, &self.inner.models_dir)?;
        let known = before.as_ref().and_then(|before| before.spec.draft);
        spec.draft = self.draft_of(&opened, &spec, options.draft.as_deref(), known, &mode).await?;
        if let Some(before) = before.as_ref().filter(|before| is_same(&before.spec, &spec)) {
            spec.clone_from(&before.spec); // the running job's spec, so that `serve` reuses the job
        }
        let draft = options.draft.filter(|draft| !draft.is_empty());
        let handle = ModelHandle { draft, ..opened.handle(spec, mode.is_temporary()) };
        let spec = handle.spec.clone();
        match serving.serve(handle, before).await {
            Ok(served) => {
                self.note_served(&served, &opened, &mode);
                Ok(served)
            }
            Err(Unserved { error, then }) => {
                let now = serving.by_name(&opened.name).map(|served| served.job);
                let why = if mode.is_last() { self.explain(&opened, &spec, now).await } else { None };
                Err(why.unwrap_or(error).and_then(then))
            }
        }
    }

    /// The content of a model's draft model, which is served first. `known`: that of the running job, if no other one is
    /// asked for.
    ///
    /// # Errors
    /// A user asked for it, and it cannot be served, or has another vocabulary.
    async fn draft_of(
        &self,
        opened: &Opened,
        spec: &ModelSpec,
        draft: Option<&str>,
        known: Option<ContentId>,
        mode: &DeployMode,
    ) -> Result<Option<ContentId>, NodeError> {
        let Some(draft) = draft else { return Ok(known) };
        if draft.is_empty() {
            return Ok(None);
        }
        match (self.serve_draft(opened, spec, draft, mode.is_temporary()).await, mode) {
            (Ok(content), _) => Ok(Some(content)),
            (Err(error), DeployMode::Requested { .. }) => Err(error),
            // Without it answers are slower, and the same.
            (Err(error), DeployMode::OnDemand { .. } | DeployMode::AfterRestart) => {
                tracing::warn!("{} is served without its draft model {draft}: {error}", opened.name);
                Ok(None)
            }
        }
    }

    /// Serves the draft model of a model, unless it is served already. It has as much room as the model.
    async fn serve_draft(
        &self,
        opened: &Opened,
        spec: &ModelSpec,
        draft: &str,
        temporary: bool,
    ) -> Result<ContentId, NodeError> {
        let small = self.open(&ModelRef(draft.to_owned())).await?;
        opened.check_draft(&small)?;
        let (serving, content) = (&self.inner.serving, small.held.content);
        match serving.find(&small.name, content) {
            Some(served) if served.spec.content == content => {
                served.uses.claim(temporary);
                return Ok(content);
            }
            Some(other) => {
                return Err(NodeError::Invalid(format!(
                    "expected a name for the draft model that is not in use, found that `{}` serves other weights: rename \
                     the file of the draft model",
                    other.name
                )));
            }
            None => {}
        }
        let (context, sequences) = (Some(spec.work.context), Some(spec.work.sequences));
        let options = ModelOptions { context, sequences, ..ModelOptions::default() };
        let small_spec = small.spec(&options, &self.inner.models_dir)?;
        match serving.serve(small.handle(small_spec.clone(), temporary), None).await {
            Ok(_) => Ok(content),
            Err(Unserved { error, .. }) => Err(self.explain(&small, &small_spec, None).await.unwrap_or(error)),
        }
    }

    /// The options with a context: by default as long as the model and the mesh's memory allow.
    async fn with_context(&self, options: ModelOptions, opened: &Opened) -> ModelOptions {
        if options.context.is_some() {
            return options;
        }
        let free = |(fleet, _): (Fleet, Options)| fleet.devices.iter().map(|device| device.memory).sum();
        let free = self.survey(None).await.map_or(0, free);
        ModelOptions { context: Some(opened.context_for(free)), ..options }
    }

    fn options(
        &self,
        mode: &DeployMode,
        entry: Option<&RememberedModel>,
        opened: &Opened,
    ) -> Result<ModelOptions, NodeError> {
        let remembered = entry.map(|entry| entry.options.clone()).unwrap_or_default();
        Ok(match mode {
            DeployMode::Requested { options, .. } => options.clone(),
            DeployMode::OnDemand { smaller } => {
                let last = self.inner.last_options.options(opened.held.content)?;
                last.or(&remembered).smaller(*smaller, CONTEXT_DEFAULT)
            }
            DeployMode::AfterRestart => remembered,
        })
    }

    /// Records a successful deployment: a permanent model is remembered.
    fn note_served(&self, served: &ModelHandle, opened: &Opened, mode: &DeployMode) {
        let Inner { serving, remembered, .. } = &*self.inner;
        remembered.set_started(&served.name);
        if matches!(mode, DeployMode::Requested { .. }) {
            self.inner.last_options.set(opened.held.content, served.options());
        }
        if matches!(mode, DeployMode::Requested { temporary: false, .. }) {
            let options = served.options();
            // The other names of the job now have these options too.
            let others = remembered.all().into_iter().filter(|entry| {
                entry.name != served.name && serving.by_name(&entry.name).is_some_and(|other| other.job == served.job)
            });
            let mut entries: Vec<RememberedModel> =
                others.map(|entry| RememberedModel { options: options.clone(), ..entry }).collect();
            entries.push(RememberedModel { name: served.name.clone(), path: opened.path.clone(), options });
            remembered.put(entries);
        }
    }

    /// Stops serving a model: its requests end with an error, and its memory is freed on every node. Also cancels a
    /// model that is still to be served again after a restart.
    ///
    /// # Errors
    /// No such model is served.
    pub(crate) async fn undeploy(&self, name: &str) -> Result<(), NodeError> {
        let _turn = self.inner.serving.turn().await;
        let mut names = vec![name.to_owned()];
        if let Some(model) = self.served(name) {
            names.extend(self.inner.serving.end(model.job).await);
            self.inner.last_options.stop(model.spec.content);
        } else if self.inner.remembered.get(name).is_none() {
            return Err(NodeError::NotFound(format!("no model `{name}` is served here")));
        }
        self.inner.remembered.remove(&names);
        Ok(())
    }

    /// Plans a model without deploying it. Unset options are taken from the running job, if the model is served.
    ///
    /// # Errors
    /// As for [`Self::deploy`].
    pub(crate) async fn plan(&self, model: ModelRef, options: ModelOptions) -> Result<PlanReport, NodeError> {
        let opened = self.open(&model).await?;
        let served = self.inner.serving.find(&opened.name, opened.held.content);
        let options = match &served {
            Some(served) => options.or(&served.options()),
            None => self.with_context(options, &opened).await,
        };
        let spec = opened.spec(&options, &self.inner.models_dir)?;
        let (call, mut events) = self.inner.hub.open(8);
        let what = Box::new(PlanSpec::Model(spec.clone()));
        self.inner.driver.input(Input::Plan { call, what, standbys: true });
        let answer = tokio::time::timeout(PLAN_MAX, async {
            loop {
                match events.recv().await {
                    None => {
                        return Err(NodeError::Failed("the node has stopped: send the request to another node".into()));
                    }
                    Some(CallEvent::Node(Event::PlanReady { result, standbys, change, .. })) => {
                        return result.map(|plan| (plan, standbys, change)).map_err(|e| NodeError::Plan(e.to_string()));
                    }
                    Some(CallEvent::Node(_)) => {}
                }
            }
        })
        .await
        .unwrap_or_else(|_| Err(NodeError::Failed("the planner did not respond: retry".into())));
        self.inner.hub.forget(call);
        let job = served.map(|served| served.job);
        let (plan, standbys, change) = match answer {
            Ok(planned) => planned,
            Err(error @ NodeError::Plan(_)) => return Err(self.explain(&opened, &spec, job).await.unwrap_or(error)),
            Err(error) => return Err(error),
        };
        let zones = self.zone_losses(job, {
            let (plan, standbys, work) = (plan.clone(), standbys.clone(), spec.work.clone());
            move |fleet, options| partitioner::zones::model_losses(&plan, &standbys, &work, fleet, options)
        });
        let zones = zones.await;
        let runs_there = change.is_some_and(|change| change.bytes == 0);
        let mut report = plan_report(opened.name, &spec, &plan, &standbys, change, &self.names().await);
        report.zones = zones;
        if let Some(job) = job.filter(|_| runs_there) {
            // Show the running job's standbys, which were chosen when other memory was free.
            let views = self.inner.driver.views().await.jobs;
            let running = views.into_iter().find(|view| view.head && view.job == name_of(job));
            report.standbys = running.map_or(report.standbys, |view| view.standbys);
        }
        Ok(report)
    }
}

/// Whether both run the same model with the same options.
fn is_same(a: &ModelSpec, b: &ModelSpec) -> bool {
    let options = |spec: &ModelSpec| (spec.int8, spec.work.context, spec.work.sequences, spec.replicas, spec.draft);
    let run = |spec: &ModelSpec| (spec.content, options(spec));
    run(a) == run(b) && Boundary::of(a) == Boundary::of(b)
}

#[cfg(test)]
mod tests {
    use super::super::testing::spec;
    use super::*;

    #[test]
    fn a_job_is_reused_for_the_same_weights_and_options_under_any_name() {
        let running = spec(1, 64);
        assert!(is_same(&running, &ModelSpec { name: "other".into(), ..running.clone() }));
        assert!(!is_same(&running, &spec(2, 64)), "other weights");
        assert!(!is_same(&running, &spec(1, 65)), "another context");
        assert!(!is_same(&running, &ModelSpec { int8: !running.int8, ..running.clone() }), "other arithmetic");
        let drafted = ModelSpec { draft: Some(ContentId([2; 32])), ..running.clone() };
        assert!(!is_same(&running, &drafted), "another draft model");
        let mut coarse = running.clone();
        crate::rows::offer(&mut coarse, &[kernels::boundary::Codec::F16]);
        assert!(!is_same(&running, &coarse), "other rows between nodes");
        let mut more = running.clone();
        more.work.sequences += 1;
        assert!(!is_same(&running, &more), "more concurrent requests");
        assert!(!is_same(&running, &ModelSpec { replicas: 2, ..running.clone() }), "more pipelines");
    }

    #[test]
    fn costs_alone_do_not_replace_a_running_job() {
        let (running, mut newer) = (spec(1, 64), spec(1, 64));
        newer.work.scratch_bytes += 1;
        assert!(is_same(&running, &newer), "another version of the program may count other bytes");
    }
}
