//! Which models other members serve. A node asks them before it serves a model itself: if a member already serves it,
//! requests are forwarded there and no second copy is loaded.
use crate::handle::model::ModelHandle;
use crate::handle::serving::{ServedModels, name_of};
use crate::views::Views;
use serde::{Deserialize, Serialize};

/// The answer to a member's query.
#[derive(Default)]
pub(crate) struct Directory {
    /// The models served here.
    pub(crate) models: ServedModels,
}

/// The models that a member serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Served {
    pub(crate) models: Vec<ServedModel>,
    /// Names of the models of which it holds parts for other coordinators. If none of these answers, one of the holders
    /// may succeed it.
    #[serde(default)]
    pub(crate) held: Vec<String>,
}

/// A model that a member serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServedModel {
    /// Its name in requests.
    pub(crate) name: String,
    /// The job that serves it.
    pub(crate) job: u64,
    /// Hash of its shard index.
    pub(crate) content: [u8; 32],
    /// Tokens of context per request.
    pub(crate) context: u32,
    /// Requests that run or wait there.
    #[serde(default)]
    pub(crate) requests: u32,
}

/// Most bytes of an answer: a node serves a few dozen models, and a name is a line long.
pub(crate) const ANSWER_BYTES_MAX: usize = 64 << 10;

impl Directory {
    /// The answer: the models that this node serves, and those of which it holds parts.
    pub(crate) fn answer(&self, views: &Views) -> Vec<u8> {
        let held = views.held_models().map(str::to_owned).collect();
        let models = self.models.lock();
        let of = |(name, model): (&String, &ModelHandle)| {
            let (name, job, content) = (name.clone(), model.job.0, model.spec.content.0);
            let requests = views.requests_of(&name_of(model.job));
            ServedModel { name, job, content, context: model.context, requests }
        };
        let served = Served { models: models.iter().map(of).collect(), held };
        let bytes = serde_json::to_vec(&served).unwrap_or_default();
        if bytes.len() <= ANSWER_BYTES_MAX { bytes } else { Vec::new() }
    }
}

/// Decodes a member's answer; `None` if it cannot be parsed. Drops models with control characters in their names,
/// because a terminal would interpret them.
pub(crate) fn decode(bytes: &[u8]) -> Option<Served> {
    let mut served: Served = serde_json::from_slice(bytes.get(..ANSWER_BYTES_MAX.min(bytes.len()))?).ok()?;
    let printable = |name: &str| !name.chars().any(char::is_control);
    served.models.retain(|model| printable(&model.name));
    served.held.retain(|name| printable(name));
    Some(served)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_round_trips_and_noise_is_rejected() {
        assert_eq!(decode(&Directory::default().answer(&Views::default())), Some(Served::default()));
        let model =
            |name: &str| ServedModel { name: name.into(), job: u64::MAX, content: [255; 32], context: 9, requests: 1 };
        let held = ["c", "d\u{7}"].map(str::to_owned).to_vec();
        let served = Served { models: vec![model("a"), model("b\u{1b}[2J")], held };
        let bytes = serde_json::to_vec(&served).unwrap();
        assert_eq!(decode(&bytes).unwrap().held, ["c"]);
        assert_eq!(decode(&bytes).unwrap().models, [model("a")], "no control characters reach a terminal");
        for noise in [&b""[..], b"{", b"[]x", &[0xff; 300], &bytes[..bytes.len() - 1]] {
            assert_eq!(decode(noise), None);
        }
    }
}
