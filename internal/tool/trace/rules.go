package trace

import (
	"fmt"
	"hash/maphash"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Finding is a rule of the CSI specification that a call breaks, as far as the trace has seen.
// Where the specification leaves a choice there is none: overlapping calls may be ABORTED, and
// its tables of errors are minimum sets.
type Finding struct {
	Rule          string `json:"rule"`
	Found         string `json:"found"`
	Specification string `json:"specification"`
}

// Rules.
const (
	ruleIdempotency = "idempotency"
	ruleStage       = "stage"
	ruleTimeout     = "timeout"
)

const (
	// kubeletTimeout is how long the kubelet waits for a call (kubelet v1.36: csiTimeout, 2 min),
	// less what its connection takes.
	kubeletTimeout = 2*time.Minute - 2*time.Second
	// askedAgain is how long after its end a call counts as still worked on. The kubelet asks
	// again after 122 s at the latest.
	askedAgain = 5 * time.Minute
)

// idempotentMethod describes the valid answers to a repetition of a request that was answered OK.
type idempotentMethod struct {
	also    codes.Code // an error that is forbidden, beside those for all
	message string     // with the id that must not change: a field of the answer, and
	id      protoreflect.Name
}

// idempotent are the methods of which the specification says "This operation MUST be
// idempotent" and "MUST reply 0 OK".
func idempotent(method string) (m idempotentMethod, is bool) {
	switch method {
	case "CreateVolume":
		return idempotentMethod{also: codes.OutOfRange, message: "volume", id: "volume_id"}, true
	case "CreateSnapshot":
		return idempotentMethod{message: "snapshot", id: "snapshot_id"}, true
	case "CreateVolumeGroupSnapshot":
		return idempotentMethod{message: "group_snapshot", id: "group_snapshot_id"}, true
	case "DeleteVolume", "DeleteSnapshot", "DeleteVolumeGroupSnapshot":
		return idempotentMethod{also: codes.NotFound}, true
	case "ControllerPublishVolume", "ControllerUnpublishVolume", "NodeStageVolume", "NodeUnstageVolume",
		"NodePublishVolume", "NodeUnpublishVolume":
		return idempotentMethod{}, true
	}
	return m, false
}

// forbids reports whether code contradicts an OK to the same request. INVALID_ARGUMENT and
// ALREADY_EXISTS are about the request's arguments, which were right.
func (m idempotentMethod) forbids(code codes.Code) bool {
	return code == codes.InvalidArgument || code == codes.AlreadyExists || code != codes.OK && code == m.also
}

// rules remember what the findings need.
type rules struct {
	seed     maphash.Seed // of all hashes
	stages   bool         // the driver has STAGE_UNSTAGE_VOLUME
	unstaged map[uint64]bool
	seen     map[uint64]bool // volumes
	answered map[uint64]answeredOK
	late     map[uint64]time.Time // calls that reached the kubelet's limit: their ends, by id
}

// answeredOK is the last call of a subject that changes anything, if it was answered OK.
type answeredOK struct {
	hash uint64
	at   time.Time
	id   string
}

// forget drops all that depends on having seen every call.
func (r *rules) forget() {
	*r = rules{seed: r.seed, stages: r.stages, unstaged: map[uint64]bool{}, seen: map[uint64]bool{},
		answered: map[uint64]answeredOK{}, late: map[uint64]time.Time{}}
}

// asked looks at a call that begins; running has all that run, with it.
func (r *rules) asked(c *call, running map[*call]bool) {
	if len(r.unstaged)+len(r.seen)+len(r.answered)+len(r.late) > maxRemembered {
		r.forget()
	}
	if c.id == 0 || !changes(c) {
		return
	}
	r.askedLate(c, running)
	if before, is := r.answered[c.subject]; is && before.hash != c.hash {
		delete(r.answered, c.subject)
	}
	switch name := c.Name(); {
	case strings.HasPrefix(name, "Delete"), name == "ControllerExpandVolume", name == "ControllerModifyVolume":
		// An object that was created, by name, may have been removed or changed since.
		for subject, before := range r.answered {
			if before.id != "" {
				delete(r.answered, subject)
			}
		}
	case name == "NodePublishVolume" && r.stages && r.unstaged[c.subject]:
		c.Findings = append(c.Findings, Finding{ruleStage,
			"the volume is published, but since it was created or unstaged no NodeStageVolume was answered OK",
			"NodeStageVolume: the CO MUST guarantee that this RPC is called and returns a success before any NodePublishVolume"})
	}
}

// askedLate finds a call that is asked again while the driver may still work on it.
func (r *rules) askedLate(c *call, running map[*call]bool) {
	found := ""
	if end, is := r.late[c.id]; is {
		delete(r.late, c.id)
		if ago := c.began.Sub(end); ago < askedAgain {
			found = fmt.Sprintf("asked again %s after the kubelet's 2 minutes ended the same call without an answer", round(ago))
		}
	}
	for other := range running {
		if age := c.began.Sub(other.began); other != c && other.id == c.id && age >= kubeletTimeout {
			found = fmt.Sprintf("asked again while the same call has been running for %s, longer than the kubelet's 2 minutes", round(age))
		}
	}
	if found != "" {
		c.Findings = append(c.Findings, Finding{ruleTimeout, found,
			"Timeouts: idempotency requirements ensure that a retried call with the same fields continues where it left off"})
	}
}

// ended looks at a call that has ended; running has those that run on.
func (r *rules) ended(c *call, response protoreflect.Message, o outcome, running map[*call]bool) {
	if answer, is := interfaceOf[*csi.NodeGetCapabilitiesResponse](response); is && o.code == codes.OK {
		r.stages = false
		for _, capability := range answer.GetCapabilities() {
			r.stages = r.stages || capability.GetRpc().GetType() == csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME
		}
	}
	if c.id == 0 || !changes(c) {
		return
	}
	late := o.end != Answered && o.end != Lost || o.end == Answered && o.code == codes.DeadlineExceeded
	if late && o.at.Sub(c.began) >= kubeletTimeout {
		r.late[c.id] = o.at
	}
	alone := true
	for other := range running {
		alone = alone && other.subject != c.subject
	}
	r.endedStage(c, response, o, alone)
	r.endedAgain(c, response, o, alone)
}

// endedStage follows which volumes are known not to be staged.
func (r *rules) endedStage(c *call, response protoreflect.Message, o outcome, alone bool) {
	ok := o.end == Answered && o.code == codes.OK
	switch c.Name() {
	case "NodeUnstageVolume":
		if ok && alone {
			r.unstaged[c.subject] = true
		}
	case "NodeStageVolume":
		if ok || o.end != Answered { // without an answer it may have been staged
			delete(r.unstaged, c.subject)
		}
	case "CreateVolume":
		if answer, is := interfaceOf[*csi.CreateVolumeResponse](response); is && ok {
			volume := maphash.String(r.seed, answer.GetVolume().GetVolumeId())
			if !r.seen[volume] {
				r.unstaged[volume] = true
			}
			r.seen[volume] = true
		}
	}
	if c.subject != 0 {
		r.seen[c.subject] = true
	}
}

// endedAgain compares the answers to one request.
func (r *rules) endedAgain(c *call, response protoreflect.Message, o outcome, alone bool) {
	method, is := idempotent(c.Name())
	before, repeated := r.answered[c.subject]
	repeated = repeated && before.hash == c.hash && before.at.Before(c.began)
	ok := o.end == Answered && o.code == codes.OK
	now := answeredOK{hash: c.hash, at: o.at, id: method.idIn(response)}
	found := ""
	switch {
	case !is || !repeated:
	case ok && now.id != before.id:
		found = "the same request was answered with another " + string(method.id)
	case o.end == Answered && method.forbids(o.code):
		found = "the same request was answered OK, and now " + o.code.String()
	}
	if found != "" {
		c.Findings = append(c.Findings, Finding{ruleIdempotency,
			fmt.Sprintf("%s (%s before)", found, round(c.began.Sub(before.at))),
			c.Name() + ": this operation MUST be idempotent"})
	}
	switch {
	case is && ok && (alone || repeated):
		r.answered[c.subject] = now
	default:
		delete(r.answered, c.subject)
	}
}

// idIn is the id that an answer to the method has.
func (m idempotentMethod) idIn(response protoreflect.Message) string {
	if response == nil || m.message == "" {
		return ""
	}
	field := response.Descriptor().Fields().ByName(protoreflect.Name(m.message))
	if field == nil || field.Message() == nil {
		return ""
	}
	inner := response.Get(field).Message()
	if id := inner.Descriptor().Fields().ByName(m.id); id != nil {
		return inner.Get(id).String()
	}
	return ""
}

// changes reports whether a call may change something.
func changes(c *call) bool {
	name := strings.TrimPrefix(strings.TrimPrefix(c.Name(), "Node"), "Controller")
	return c.subject != 0 && !strings.HasPrefix(name, "Get") && !strings.HasPrefix(name, "List") && !strings.HasPrefix(name, "Validate")
}

// interfaceOf is a decoded message as its generated type.
func interfaceOf[T any](m protoreflect.Message) (T, bool) {
	if m == nil {
		var none T
		return none, false
	}
	typed, is := m.Interface().(T)
	return typed, is
}
