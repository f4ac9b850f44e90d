//! API errors with the matching HTTP status, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`; below
//! `/v1/messages` in Anthropic's: `{"type": "error", "error": {"type", "message"}}`.
use crate::handle::NodeError;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use node_core::work::serve::DoneReason;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::time::Duration;

/// An error response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    pub(crate) code: Option<&'static str>,
    pub(crate) param: Option<Cow<'static, str>>,
    pub(crate) message: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, kind, code, param: None, message: message.into() }
    }

    /// 400: the request is wrong; `param` names the field.
    pub(crate) fn invalid(param: impl Into<Option<&'static str>>, message: impl Into<String>) -> Self {
        let param: Option<&'static str> = param.into();
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", None, message);
        Self { param: param.map(Cow::Borrowed), ..error }
    }

    /// 400: the request is wrong at a path inside a field, as in `messages[0].content`.
    pub(crate) fn invalid_at(place: String, message: impl Into<String>) -> Self {
        Self { param: Some(Cow::Owned(place)), ..Self::invalid(None, message) }
    }

    /// 400: a field of OpenAI's API that this server does not support.
    pub(crate) fn unsupported(param: &'static str, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    /// 400: a part of a field that this server does not support.
    pub(crate) fn unsupported_at(place: String, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::invalid_at(place, message) }
    }

    /// 400: the prompt does not fit the context.
    pub(crate) fn too_long(prompt: usize, context: u32) -> Self {
        let message = format!(
            "this model's context is {context} tokens, but the prompt alone has {prompt}: shorten the prompt, or serve the model with a larger --context"
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid("messages", message) }
    }

    /// The same error at this place.
    pub(crate) fn at(self, place: String) -> Self {
        Self { param: Some(Cow::Owned(place)), ..self }
    }

    pub(crate) fn unauthorised(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", Some("invalid_api_key"), message)
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", Some("forbidden"), message)
    }

    pub(crate) fn not_found(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", Some(code), message)
    }

    /// 404 for a model, with `param` as OpenAI's clients expect.
    pub(crate) fn no_model(message: impl Into<String>) -> Self {
        Self { param: Some(Cow::Borrowed("model")), ..Self::not_found("model_not_found", message) }
    }

    pub(crate) fn method(message: impl Into<String>) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", Some("method_not_allowed"), message)
    }

    pub(crate) fn too_large(bytes_max: usize) -> Self {
        let message = format!("the request body is larger than the limit of {bytes_max} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", Some("body_too_large"), message)
    }

    /// 408: the body did not arrive in time.
    pub(crate) fn too_slow(limit: Duration) -> Self {
        let message = format!("the request body did not arrive within {} s", limit.as_secs());
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", Some("body_too_slow"), message)
    }

    /// 503: every connection slot of the API is taken by a running request.
    pub(crate) fn crowded() -> Self {
        let message = "too many concurrent requests on this node's API: try again in a moment";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", Some("too_many_connections"), message)
    }

    pub(crate) fn media_type() -> Self {
        let message = "send JSON with the header `content-type: application/json`";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", Some("media_type"), message)
    }

    /// 422: the same key was used for two different requests.
    pub(crate) fn key_reused() -> Self {
        let message =
            "this Idempotency-Key was already used for a different request: send a new request with a new key";
        let code = Some("idempotency_key_reused");
        let error = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_request_error", code, message);
        Self { param: Some(Cow::Borrowed("Idempotency-Key")), ..error }
    }

    /// 409: the first request with this key is still running.
    pub(crate) fn key_running() -> Self {
        let message = "the request with this Idempotency-Key is still running on this node: retry after it has ended";
        let code = Some("idempotency_key_running");
        let error = Self::new(StatusCode::CONFLICT, "invalid_request_error", code, message);
        Self { param: Some(Cow::Borrowed("Idempotency-Key")), ..error }
    }

    /// 409: the job to cancel has already ended.
    pub(crate) fn over(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "invalid_request_error", Some("job_over"), message)
    }

    fn busy() -> Self {
        let message = "the request queue of this model is full: try again in a moment";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("queue_full"), message)
    }

    /// 503: the mesh cannot do this now.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", Some("mesh_failed"), message)
    }

    /// `None` for the reasons that are not errors.
    pub(crate) fn from_reason(reason: &DoneReason) -> Option<Self> {
        match reason {
            DoneReason::Stop | DoneReason::Length => None,
            DoneReason::Cancelled => Some(Self::failed(
                "the request was cancelled, as when this node leaves the mesh: send it to another node",
            )),
            DoneReason::Busy => Some(Self::busy()),
            DoneReason::Invalid(what) => Some(Self::invalid(None, what.clone())),
            DoneReason::Failed(what) => Some(Self::failed(what.clone())),
        }
    }

    /// The error with other names of fields, for an API that is translated. Each pair has OpenAI's name and the other one; the
    /// first that occurs is replaced.
    #[must_use]
    pub(crate) fn renamed(self, names: &[(&str, &str)]) -> Self {
        let rename = |text: &str| {
            let found = names.iter().find(|(name, _)| text.contains(name));
            found.map_or_else(|| text.to_owned(), |(name, other)| text.replace(name, other))
        };
        // A place is a name without the quotes that it has in a message.
        let place = |param: &str| rename(&format!("`{param}`")).trim_matches('`').to_owned();
        Self { param: self.param.map(|param| Cow::Owned(place(&param))), message: rename(&self.message), ..self }
    }

    /// The JSON body of the response.
    pub(crate) fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }

    /// The JSON body in Anthropic's form, which has no field for the place.
    pub(crate) fn anthropic_body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE if self.code == Some("too_many_connections") => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        let message = match &self.param {
            Some(place) if !self.message.contains(&**place) => format!("{place}: {}", self.message),
            Some(_) | None => self.message.clone(),
        };
        json!({"type": "error", "error": {"type": kind, "message": message}})
    }

    fn response(&self, body: Value) -> Response {
        let mut response = (self.status, axum::Json(body)).into_response();
        let headers = response.headers_mut();
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::CONFLICT => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

/// Middleware around all routes: an error has the form of the API that the path belongs to.
pub(super) async fn in_the_form_of_its_api(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_anthropic = path == "/v1/messages" || path.starts_with("/v1/messages/");
    let mut response = next.run(request).await;
    match response.extensions_mut().remove::<ApiError>() {
        Some(error) if is_anthropic => error.response(error.anthropic_body()),
        Some(_) | None => response,
    }
}

impl From<NodeError> for ApiError {
    fn from(error: NodeError) -> Self {
        let message = error.to_string();
        match error {
            NodeError::Busy => Self::busy(),
            NodeError::NotFound(_) => Self::not_found("not_found", message),
            NodeError::Invalid(_) => Self::invalid(None, message),
            NodeError::Plan(_) => Self { code: Some("no_plan"), ..Self::failed(message) },
            NodeError::Unauthorised(_) => Self::forbidden(message),
            NodeError::Unreachable(_) | NodeError::Failed(_) => Self::failed(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.response(self.body());
        response.extensions_mut().insert(self);
        response
    }
}
