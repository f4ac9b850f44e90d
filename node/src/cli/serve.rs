//! `meshnode serve`: serves a model through an OpenAI-compatible API, on a running node or on one that it starts.
use super::failure::Failure;
use super::global::{Global, answer};
use super::interrupt::Interrupts;
use super::model::ModelArgs;
use super::print::remark;
use super::service::Service;
use serde_json::{Value, json};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode serve smollm2-135m
  curl http://127.0.0.1:9470/v1/chat/completions -H 'content-type: application/json' \\
       -d '{\"model\": \"smollm2-135m\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'

  meshnode serve smollm2-135m --context 8192    running requests end with an error
  meshnode serve smollm2-135m --stop

If a node is running, it serves the model from now on, also after a restart, and this command returns. Otherwise this \
command runs a node itself, until Ctrl-C.

--json prints model, base_url, context, own_node, also_served_by (other members serving it).")]
pub(super) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Stop serving the model: its requests end, and its memory is freed on every node
    #[arg(long, conflicts_with_all = ["activations", "context", "sequences", "replicas", "draft", "boundary"])]
    stop: bool,
}

pub(super) fn serve(global: &Global, args: &ServeArgs) -> Result<(), Failure> {
    if args.stop {
        return stop(global, &args.model.model);
    }
    let address = global.listen_address()?;
    let interrupts = Interrupts::listen()?;
    let (service, served): (_, Value) =
        Service::ask(&interrupts, global, &args.model, Some(address), ("/api/v1/deploy", false))?;
    let name = served["model"].as_str().unwrap_or(&args.model.model);
    let base = format!("{}/v1", service.address);
    let value = json!({
        "model": name, "base_url": base, "context": served["context"], "own_node": service.is_own(),
        "also_served_by": served["also_served_by"],
    });
    answer(global, &value, |_| format!("serving {name} at {base}"));
    for member in served["also_served_by"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        remark(format!(
            "{member} also serves {name}: the mesh now holds a second copy of its weights. To free it, run \
             `meshnode serve {name} --stop` on one of the two nodes"
        ));
    }
    if service.is_own() {
        remark("press Ctrl-C to stop");
        return service.wait_for_end(&interrupts);
    }
    Ok(())
}

fn stop(global: &Global, model: &str) -> Result<(), Failure> {
    let value = global.client()?.delete(&format!("/api/v1/models/{}", crate::pull::encode_path(model)))?;
    answer(global, &value, |v| format!("stopped serving {}", v["model"].as_str().unwrap_or(model)));
    Ok(())
}
