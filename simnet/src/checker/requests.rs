//! Every accepted request ends once; each (request, position) is reported once and in order; tokens equal the solo chain.
use crate::compute::solo;
use crate::workload::{Call, Workload};
use node_core::id::CallId;
use node_core::work::serve::DoneReason;

/// All violations in what callers received.
pub fn violations(workload: &Workload) -> Vec<String> {
    workload.calls.iter().flat_map(|(id, call)| violations_of(workload, *id, call)).collect()
}

fn violations_of(workload: &Workload, id: CallId, call: &Call) -> Vec<String> {
    let mut wrong = Vec::new();
    if call.ends.len() != 1 {
        wrong.push(format!("call {} ended {} times: {:?}", id.0, call.ends.len(), call.ends));
    }
    for (i, (_, position, _)) in call.tokens.iter().enumerate() {
        let expected = (call.request.prompt.len() + i) as u32;
        if *position != expected {
            wrong.push(format!("call {}: received position {position}, expected {expected}", id.0));
        }
    }
    let end = call.ends.first();
    if let (Some((end, _)), Some((last, ..))) = (end, call.tokens.last())
        && last > end
    {
        wrong.push(format!("call {}: a token after its end", id.0));
    }
    let received: Vec<u32> = call.tokens.iter().map(|(.., token)| *token).collect();
    let expected = expected_tokens(workload, call);
    let whole = end.is_none_or(|(_, reason)| matches!(reason, DoneReason::Stop | DoneReason::Length));
    let right = if whole && end.is_some() { received == expected } else { expected.starts_with(&received) };
    if !right {
        let at = received.iter().zip(&expected).position(|(a, b)| a != b);
        wrong.push(format!(
            "call {}: received {} tokens, the solo chain has {}, first difference at {at:?}, end {end:?}",
            id.0,
            received.len(),
            expected.len()
        ));
    }
    wrong
}

/// The tokens of a run on one node, bounded by the context.
fn expected_tokens(workload: &Workload, call: &Call) -> Vec<u32> {
    let model = &workload.model;
    let room = model.work.context.saturating_sub(call.request.prompt.len() as u32);
    let most = call.request.max_tokens.min(room);
    let layers = model.work.layers.len() as u32;
    solo(&model.content, layers, &call.request.prompt, most, &call.request.sampling)
}
