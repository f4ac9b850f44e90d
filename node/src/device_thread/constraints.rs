//! The grammars of a stage's requests: which tokens each request may draw next.
use kernels_models::constraint::{Constraint, GRAMMAR_BYTES_MAX, GrammarVocabulary};
use kernels_models::weights::ModelFile;
use node_core::work::serve::{self, Item, SampleSpec};
use std::collections::HashMap;
use std::sync::Arc;

const _: () =
    assert!(GRAMMAR_BYTES_MAX == serve::GRAMMAR_BYTES_MAX, "the core accepts the grammars that can be compiled");

/// The constraints of a stage with an output head. A stage has at most as many requests as it has caches.
pub(super) struct Constraints {
    /// The model, whose header has the vocabulary. `None`: the stage draws no tokens.
    file: Option<Arc<ModelFile>>,
    /// Built for the first request with a grammar, since most models never get one.
    vocabulary: Option<Result<GrammarVocabulary, String>>,
    by_request: HashMap<u64, Request>,
}

struct Request {
    grammar: String,
    constraint: Constraint,
}

impl Constraints {
    /// Without requests.
    pub(super) fn new(file: Option<Arc<ModelFile>>) -> Self {
        Self { file, vocabulary: None, by_request: HashMap::new() }
    }

    /// For each item the tokens that it may draw, if it has a grammar: bit `id % 32` of word `id / 32`. An answer that its
    /// grammar does not allow may only end. A grammar that cannot be compiled here constrains nothing: the entry node, which
    /// compiled it first, checks every token.
    pub(super) fn allowed(&mut self, items: &[Item]) -> Vec<Option<Vec<u32>>> {
        items.iter().map(|item| self.of(item.request.0, item.sample.as_ref()?)).collect()
    }

    fn of(&mut self, request: u64, sample: &SampleSpec) -> Option<Vec<u32>> {
        let grammar = sample.sampling.grammar.as_ref()?;
        if self.by_request.get(&request).is_none_or(|known| known.grammar != *grammar) {
            let vocabulary = self.vocabulary.get_or_insert_with(|| vocabulary(self.file.as_deref()));
            let compiled = match vocabulary {
                Ok(vocabulary) => Constraint::new(vocabulary, grammar).map_err(|e| e.to_string()),
                Err(reason) => Err(reason.clone()),
            };
            match compiled {
                Ok(constraint) => {
                    drop(self.by_request.insert(request, Request { grammar: grammar.clone(), constraint }))
                }
                Err(reason) => {
                    tracing::warn!("an answer cannot be constrained to its grammar: {reason}");
                    return None;
                }
            }
        }
        let constraint = &mut self.by_request.get_mut(&request)?.constraint;
        // After an error only end-of-text tokens are allowed.
        let _ = constraint.follow(sample.history.get(sample.prompt as usize..).unwrap_or_default());
        Some(constraint.allowed())
    }

    /// The request is over.
    pub(super) fn release(&mut self, request: u64) {
        self.by_request.remove(&request);
    }
}

fn vocabulary(file: Option<&ModelFile>) -> Result<GrammarVocabulary, String> {
    let file = file.ok_or("this stage draws no tokens")?;
    let tokenizer = file.tokenizer().map_err(|e| e.to_string())?;
    GrammarVocabulary::new(&tokenizer).map_err(|e| e.to_string())
}
