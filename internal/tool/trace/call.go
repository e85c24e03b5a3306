package trace

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"csi-registrar/internal/sys/safetext"
)

// Call is the record of one call.
type Call struct {
	Time          time.Time       `json:"time"`
	Method        string          `json:"method"`
	Volume        string          `json:"volume,omitempty"`
	Attempt       int             `json:"attempt"`
	DurationMS    float64         `json:"duration_ms"`
	End           End             `json:"end"`
	Code          string          `json:"code,omitempty"`
	Error         string          `json:"error,omitempty"` // only with ErrorText; printable
	RequestBytes  int64           `json:"request_bytes"`
	Request       json.RawMessage `json:"request,omitempty"`
	ResponseBytes int64           `json:"response_bytes"`
	Response      json.RawMessage `json:"response,omitempty"`
}

// Duration is the time from the first header to the end.
func (c Call) Duration() time.Duration {
	return time.Duration(c.DurationMS * float64(time.Millisecond))
}

// Name is the method without its service.
func (c Call) Name() string { return c.Method[strings.LastIndexByte(c.Method, '/')+1:] }

// End is how a call ended.
type End string

// How a call ends.
const (
	Answered     End = "answered"     // with a status: Code
	TimedOut     End = "timeout"      // the caller's time limit passed without an answer
	Cancelled    End = "cancelled"    // the caller did not wait any longer
	Reset        End = "reset"        // the driver ended it without a status
	Disconnected End = "disconnected" // the connection ended
	Lost         End = "lost"         // the record does not have its end
	Running      End = "running"      // not yet; only in what Recorder.Calls yields in between
)

// call is a call while it runs.
type call struct {
	Call
	method   protoreflect.MethodDescriptor // nil: none of CSI
	began    time.Time
	limit    time.Duration // the caller's, 0: none
	asked    bool          // the request is there, as far as it will ever be
	shown    bool          // as running
	messages [2]message    // by direction
	trailers bool          // the driver has sent its status
	status   codes.Code
	text     string // grpc-message

	id string // of method, volume and paths: the same when it is asked again; empty: not known
}

// newCall begins a call of a path such as /csi.v1.Node/NodePublishVolume.
func newCall(path string, at time.Time) *call {
	c := &call{began: at}
	c.Time, c.Method = at, "(unknown method)"
	path = strings.TrimPrefix(path, "/")
	if service, method, ok := strings.Cut(path, "/"); ok && isName(service) && isName(method) {
		c.Method = path
		if s := csi.File_csi_proto.Services().ByName(protoreflect.FullName(service).Name()); s != nil && s.FullName() == protoreflect.FullName(service) {
			c.method = s.Methods().ByName(protoreflect.Name(method))
		}
	}
	return c
}

// isName reports whether s can be the name of a service or a method. Other programs' are
// shown too: they are part of an interface, not of anybody's data.
func isName(s string) bool {
	return len(s) <= 80 && protoreflect.FullName(s).IsValid()
}

// timeLimit reads a grpc-timeout: up to eight digits and a unit. 0: there is none.
func timeLimit(s string) time.Duration {
	units := map[byte]string{'H': "h", 'M': "m", 'S': "s", 'm': "ms", 'u': "us", 'n': "ns"}
	if len(s) < 2 || len(s) > 9 || strings.Trim(s[:len(s)-1], "0123456789") != "" {
		return 0
	}
	limit, _ := time.ParseDuration(s[:len(s)-1] + units[s[len(s)-1]]) // 0 after an error
	return limit
}

// identifying are the fields that say what a call is about. The first of the subjects that is
// set is shown as its volume.
var identifying = []protoreflect.Name{
	"volume_id", "name", "snapshot_id", "group_snapshot_id", "source_volume_id",
	"node_id", "target_path", "volume_path", "staging_target_path",
}

const subjects = 5 // of identifying

// setRequest takes the request of a call.
func (c *call) setRequest(show []string) {
	c.asked = true
	c.RequestBytes = c.messages[toDriver].size
	request := c.decode(toDriver)
	if request == nil {
		return
	}
	c.Request = shownMessage(request, show)
	fields := request.Descriptor().Fields()
	c.id = c.Method
	for i, name := range identifying {
		fd := fields.ByName(name)
		if fd == nil || fd.Kind() != protoreflect.StringKind || fd.IsList() || request.Get(fd).String() == "" {
			continue
		}
		value := request.Get(fd).String()
		if c.Volume == "" && i < subjects && isShown(fd) {
			c.Volume = cut(value)
		}
		c.id += "\x00" + string(name) + value
	}
}

// setOutcome takes the answer and the end of a call.
func (c *call) setOutcome(end End, at time.Time, show []string) {
	c.DurationMS = float64(at.Sub(c.began).Microseconds()) / 1e3
	c.End = end
	// At the limit either side may end the call first. Their clocks and ours differ a little, and
	// a busy machine shows us the beginning late.
	early := max(c.limit/100, min(c.limit/10, 100*time.Millisecond))
	if end != Answered && end != Lost && c.limit > 0 && at.Sub(c.began) >= c.limit-early {
		c.End = TimedOut
	}
	c.ResponseBytes = c.messages[toCaller].size
	if end == Answered {
		c.Code = c.status.String()
		if c.status != codes.OK && slices.Contains(show, ErrorText) {
			c.Error = safetext.Clean(c.text, maxShownText)
		}
	}
	if response := c.decode(toCaller); response != nil {
		c.Response = shownMessage(response, show)
	}
}

// decode returns a message of the call, or nil if it is not kept, or not what CSI describes.
func (c *call) decode(dir direction) protoreflect.Message {
	m := &c.messages[dir]
	if !m.whole || c.method == nil {
		return nil
	}
	descriptor := c.method.Input()
	if dir == toCaller {
		descriptor = c.method.Output()
	}
	kind, err := protoregistry.GlobalTypes.FindMessageByName(descriptor.FullName())
	if err != nil {
		return nil
	}
	decoded := kind.New()
	if proto.Unmarshal(m.first, decoded.Interface()) != nil {
		return nil
	}
	return decoded
}
