package trace

import (
	"slices"
	"strings"

	"csi-registrar/internal/sys/secrettext"
)

const hiddenText = "(hidden)"

// sensitive are parts of names whose values are taken for secrets wherever they are in a request.
var sensitive = []string{"pass", "pwd", "secret", "token", "bearer", "authorization", "credential", "apikey", "api-key", "api_key", "private", "cookie"}

func isSensitive(name string) bool {
	name = strings.ToLower(name)
	return slices.ContainsFunc(sensitive, func(s string) bool { return strings.Contains(name, s) })
}

// errorTexts shows the texts of errors without the secrets of the trace. A driver may repeat in
// any call what it got in another one: NodePublishVolume what NodeStageVolume had.
type errorTexts struct {
	secrets *secrettext.Matcher
	// unknown: a request was not decoded, so not all secrets are known.
	unknown bool
}

// newErrorTexts returns nil unless a person asked for the texts by the key ErrorText.
func newErrorTexts(show []string) *errorTexts {
	if !slices.Contains(show, ErrorText) {
		return nil
	}
	return &errorTexts{secrets: secrettext.New()}
}

// learn takes the secrets of a message, and of its metadata.
func (e *errorTexts) learn(r *redactor, metadata []string) {
	if e == nil {
		return
	}
	e.unknown = e.unknown || r.partial
	for _, s := range append(metadata, r.secrets...) {
		e.secrets.Add(s)
	}
}

// learnBytes takes all of a message that is none of CSI.
func (e *errorTexts) learnBytes(m *message, metadata []string) {
	if e == nil {
		return
	}
	e.unknown = e.unknown || !m.whole && m.size > 0 || m.count > 1
	for _, s := range append(metadata, string(m.first)) {
		e.secrets.Add(s)
	}
}

// forget notes that messages were missed.
func (e *errorTexts) forget() {
	if e != nil {
		e.unknown = true
	}
}

// shown is the text of an error as it may be shown; of a nil errorTexts nothing is. It looks for
// secrets in the whole text, before anything is cut.
func (e *errorTexts) shown(text string) string {
	switch {
	case e == nil || text == "":
		return ""
	case e.unknown, e.secrets.Full():
		return hiddenText
	}
	return e.secrets.Redact(text, hiddenText)
}
