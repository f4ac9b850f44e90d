//! The list of operations in the API's description. A test compares it with the routes and with what they read and answer.
use super::super::anthropic::{COUNT_TOKENS, MESSAGES};
use super::super::embeddings::EMBEDDINGS;
use super::super::grids::SUBMIT;
use super::super::guard::Access::{Administer, Open, Public};
use super::super::login::TOKEN;
use super::super::management::{DRAIN, INVITE, MODEL, PEER, RAW};
use super::super::request::BODY;
use super::super::responses::RESPONSES;
use super::Input::{Body as Json, Nothing, Query, Retried};
use super::Output::{List, Object, ObjectOrEvents, Other};
use super::{Access, Body, Input, Operation, Output};

const COMPLETION_FIELDS: &[&str] = &["id", "object", "created", "model", "system_fingerprint", "choices", "usage"];
const MODEL_FIELDS: &[&str] = &["id", "object", "created", "owned_by", "context_length", "state"];
const RESPONSE: &[&str] = &[
    "id",
    "object",
    "created_at",
    "status",
    "error",
    "incomplete_details",
    "model",
    "output",
    "usage",
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "top_p",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "store",
    "background",
    "previous_response_id",
];
const MESSAGE: &[&str] = &["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"];
const STATE: &[&str] = &[
    "node",
    "name",
    "peer_id",
    "mesh",
    "peers",
    "jobs",
    "membership_ends",
    "banned",
    "waiting",
    "weights",
    "boundary",
];
const PLAN_FIELDS: &[&str] = &[
    "model",
    "context",
    "sequences",
    "token_ms",
    "boundary",
    "row_bytes",
    "exact",
    "stages",
    "reasons",
    "standbys",
    "losses",
    "zones",
    "change",
];
const DEPLOYED: &[&str] = &["model", "context", "also_served_by"];
const GRID_PLAN_FIELDS: &[&str] = &[
    "simulation",
    "rule",
    "size",
    "steps",
    "step_ms",
    "mlups",
    "depth",
    "busy_percent",
    "duration_s",
    "tiles",
    "standbys",
    "zones",
    "warnings",
];
/// What the reports of all states have.
const REPORT: &[&str] = &["job", "name", "state"];
const BANNED: &[&str] = &["banned", "with_it", "void_tickets", "warning"];

const EMPTY: Body = Body::of(&[]);
const CHAT: Body = Body::of(&[BODY]).except(&["prompt", "best_of", "echo", "suffix"]).required(&["messages"]);
const COMPLETION: Body = Body::of(&[BODY])
    .except(&[
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "modalities",
        "max_completion_tokens",
    ])
    .required(&["prompt"]);
/// The sampling parameters, and what the prompt is.
const GENERATE: Body = Body::of(&[BODY, RAW]).except(&[
    "stream",
    "stream_options",
    "n",
    "best_of",
    "echo",
    "suffix",
    "logprobs",
    "top_logprobs",
    "functions",
    "modalities",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "grammar",
]);
const PLAN: Body = Body::of(&[MODEL]).except(&["temporary"]);
const PLAN_GRID: Body = Body::of(&[SUBMIT]).except(&["out", "claim", "resume", "overwrite"]);
const DRAINING: Body = Body::of(&[DRAIN]);

const fn get(path: &'static str, access: Access, summary: &'static str, input: Input, output: Output) -> Operation {
    Operation { method: "GET", path, access, summary, input, output }
}

const fn post(path: &'static str, access: Access, summary: &'static str, input: Input, output: Output) -> Operation {
    Operation { method: "POST", path, access, summary, input, output }
}

const fn delete(path: &'static str, summary: &'static str, output: Output) -> Operation {
    Operation { method: "DELETE", path, access: Administer, summary, input: Nothing, output }
}

/// In the order of the routes.
pub(super) const OPERATIONS: &[Operation] = &[
    get("/v1/models", Open, "Models that requests can name", Nothing, Object(&["object", "data"])),
    get("/v1/models/{*name}", Open, "One of these models", Nothing, Object(MODEL_FIELDS)),
    post("/v1/chat/completions", Open, "Continue a conversation", Retried(CHAT), ObjectOrEvents(COMPLETION_FIELDS)),
    post("/v1/completions", Open, "Continue a text", Retried(COMPLETION), ObjectOrEvents(COMPLETION_FIELDS)),
    post(
        "/v1/responses",
        Open,
        "Answer a conversation of items",
        Retried(Body::of(&[RESPONSES])),
        ObjectOrEvents(RESPONSE),
    ),
    post(
        "/v1/embeddings",
        Open,
        "Embeddings of texts",
        Json(Body::of(&[EMBEDDINGS])),
        Object(&["object", "data", "model", "usage"]),
    ),
    post(
        "/v1/messages",
        Open,
        "Answer a conversation of blocks",
        Retried(Body::of(&[MESSAGES])),
        ObjectOrEvents(MESSAGE),
    ),
    post(
        "/v1/messages/count_tokens",
        Open,
        "Count the tokens of a conversation of blocks",
        Json(Body::of(&[COUNT_TOKENS])),
        Object(&["input_tokens"]),
    ),
    get("/openapi.json", Public, "This description", Nothing, Object(&["openapi", "info", "paths", "components"])),
    get("/healthz", Public, "Whether the node runs", Nothing, Other("text/plain")),
    get("/readyz", Open, "Whether the node's jobs are ready", Nothing, Object(&["ready", "waiting"])),
    get("/metrics", Open, "Counters for Prometheus", Nothing, Other("application/openmetrics-text")),
    get(
        "/api/v1/proof",
        Public,
        "Proof that the node knows its key",
        Query(&[("nonce", "string")]),
        Object(&["proof"]),
    ),
    post("/api/v1/open", Administer, "A link to the web page", Json(EMPTY), Object(&["fragment", "seconds"])),
    post("/api/v1/session", Public, "A key for a browser", Json(Body::of(&[TOKEN])), Object(&["key"])),
    get("/api/v1/state", Open, "The node, its peers and its jobs", Nothing, Object(STATE)),
    get("/api/v1/peers", Open, "The members of the mesh", Nothing, List),
    get("/api/v1/jobs", Open, "The models that are served", Nothing, List),
    post("/api/v1/plan", Open, "Plan the placement of a model", Json(PLAN), Object(PLAN_FIELDS)),
    post("/api/v1/deploy", Administer, "Serve a model", Json(Body::of(&[MODEL])), Object(DEPLOYED)),
    delete("/api/v1/models/{*name}", "Stop serving a model", Object(&["model", "served"])),
    post("/api/v1/generate", Open, "Generate text, with token ids", Json(GENERATE), Other("application/jsonl")),
    post("/api/v1/grids", Administer, "Submit a simulation", Json(Body::of(&[SUBMIT])), Object(&["job", "from_step"])),
    get("/api/v1/grids", Open, "Reports of all simulations", Nothing, List),
    post("/api/v1/grids/plan", Open, "Plan the placement of a simulation", Json(PLAN_GRID), Object(GRID_PLAN_FIELDS)),
    get("/api/v1/grids/{job}", Open, "The report of a simulation", Nothing, Object(REPORT)),
    delete("/api/v1/grids/{job}", "Cancel a simulation", Object(&["job", "cancelled"])),
    get("/api/v1/grids/{job}/picture", Open, "The current picture", Nothing, Other("image/png")),
    get(
        "/api/v1/grids/{job}/text",
        Open,
        "The current picture as coloured half blocks",
        Query(&[("columns", "integer"), ("lines", "integer")]),
        Other("text/plain"),
    ),
    get("/api/v1/grids/{job}/events", Open, "Reports as they change", Nothing, Other("application/jsonl")),
    get("/", Public, "The web page", Nothing, Other("text/html")),
    get("/watch/{job}", Public, "The web page of a simulation", Nothing, Other("text/html")),
    post(
        "/api/v1/invite",
        Administer,
        "Create a ticket",
        Json(Body::of(&[INVITE])),
        Object(&["ticket", "ttl_s", "uses"]),
    ),
    post("/api/v1/approve", Administer, "Admit a waiting peer", Json(Body::of(&[PEER])), Object(&["approved"])),
    post("/api/v1/ban", Administer, "Ban a member", Json(Body::of(&[PEER])), Object(BANNED)),
    post("/api/v1/drain", Administer, "Accept no new work, or accept it again", Json(DRAINING), Object(&["draining"])),
    post("/api/v1/leave", Administer, "Leave the mesh and end the node", Json(EMPTY), Object(&["left", "process"])),
];
