//! A tokenizer and chat template for tests of the API.
use super::super::engine::Text;
use kernels_models::chat_template::ChatMessage;
use kernels_models::constraint::{Constraint, GrammarVocabulary};
use kernels_models::weights::testing::{TINY_CONTROL, TinyModel};
use serde_json::Value;

/// A tokenizer with one token per byte: token = byte in prompts. In answers the ids are those of the small model, whose
/// vocabulary grammars use: its control tokens come before the bytes.
pub(super) struct Bytes {
    /// What the chat template mentions.
    pub(super) template: &'static str,
    /// Elements of an embedding.
    pub(super) embedding: Option<u32>,
}

pub(super) const FIRST_BYTE: u32 = TINY_CONTROL.len() as u32;

impl Text for Bytes {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(text.bytes().map(u32::from).collect())
    }
    fn chat(&self, messages: &[ChatMessage], tools: &[Value]) -> Option<Result<Vec<u32>, String>> {
        let tools: String = tools.iter().map(|tool| format!("<tool>{tool}")).collect();
        Some(match messages.last().map(|m| m.role.as_str()) {
            Some("assistant") => Err("the last turn must be the user's".into()),
            _ => {
                let calls =
                    |m: &ChatMessage| m.tool_calls.iter().map(|call| format!("<call>{call}")).collect::<String>();
                let turn = |m: &ChatMessage| format!("<{}>{}{}", m.role, m.content, calls(m));
                self.encode(&(tools + &messages.iter().map(turn).collect::<String>()))
            }
        })
    }
    fn embedding(&self) -> Option<u32> {
        self.embedding
    }
    fn chats(&self) -> bool {
        true
    }
    fn bytes(&self, token: u32) -> Vec<u8> {
        vec![(token - FIRST_BYTE) as u8]
    }
    fn vocabulary(&self) -> u32 {
        256
    }
    fn template_mentions(&self, text: &str) -> bool {
        self.template.contains(text)
    }
    fn constrain(&self, grammar: &str) -> Result<Constraint, String> {
        let tokenizer = TinyModel::default().open().tokenizer().map_err(|e| e.to_string())?;
        let vocabulary = GrammarVocabulary::new(&tokenizer).map_err(|e| e.to_string())?;
        Constraint::new(&vocabulary, grammar).map_err(|e| e.to_string())
    }
    fn control_token(&self, _: &str) -> Option<u32> {
        None
    }
}
