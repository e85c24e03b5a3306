package trace

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// step is a call that a test makes, and how the driver answers it.
type step struct {
	request proto.Message
	answer  any    // a response, or a code
	want    string // rules that are found
}

func (s step) method() string {
	return strings.TrimSuffix(string(s.request.ProtoReflect().Descriptor().Name()), "Request")
}

func publish(volume, target string) proto.Message {
	return &csi.NodePublishVolumeRequest{VolumeId: volume, TargetPath: target, Secrets: map[string]string{"a": "1", "b": "2", "c": "3", "d": "4"}}
}

func unpublish(volume, target string) proto.Message {
	return &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target}
}

func stage(volume string) proto.Message {
	return &csi.NodeStageVolumeRequest{VolumeId: volume, StagingTargetPath: "/s"}
}

func unstage(volume string) proto.Message {
	return &csi.NodeUnstageVolumeRequest{VolumeId: volume, StagingTargetPath: "/s"}
}

func create(name string) proto.Message { return &csi.CreateVolumeRequest{Name: name} }

func created(id string) proto.Message {
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: id}}
}

func remove(volume string) proto.Message { return &csi.DeleteVolumeRequest{VolumeId: volume} }

func snapshot(name string) proto.Message {
	return &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: "v"}
}

func cut1(id string, ready bool) proto.Message {
	return &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: id, ReadyToUse: ready}}
}

// capabilities answers NodeGetCapabilities.
func capabilities(types ...csi.NodeServiceCapability_RPC_Type) proto.Message {
	response := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range types {
		response.Capabilities = append(response.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}})
	}
	return response
}

func TestFindings(t *testing.T) {
	ok := codes.OK
	askStages := step{&csi.NodeGetCapabilitiesRequest{}, capabilities(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME), ""}
	for name, steps := range map[string][]step{
		// A driver, or a caller, that breaks a rule.
		"published once more: exists":      {{publish("v", "/t"), ok, ""}, {publish("v", "/t"), codes.AlreadyExists, "idempotency"}},
		"published once more: invalid":     {{publish("v", "/t"), ok, ""}, {publish("v", "/t"), ok, ""}, {publish("v", "/t"), codes.InvalidArgument, "idempotency"}},
		"staged once more":                 {{stage("v"), ok, ""}, {stage("v"), codes.AlreadyExists, "idempotency"}},
		"created once more: another":       {{create("n"), created("a"), ""}, {create("n"), created("b"), "idempotency"}},
		"created once more: out of range":  {{create("n"), created("a"), ""}, {create("n"), codes.OutOfRange, "idempotency"}},
		"another snapshot":                 {{snapshot("n"), cut1("a", false), ""}, {snapshot("n"), cut1("b", true), "idempotency"}},
		"deleted once more":                {{remove("v"), ok, ""}, {remove("v"), codes.NotFound, "idempotency"}},
		"with reads between":               {{publish("v", "/t"), ok, ""}, {&csi.NodeGetVolumeStatsRequest{VolumeId: "v"}, ok, ""}, {publish("v", "/t"), codes.AlreadyExists, "idempotency"}},
		"published after unstage":          {askStages, {unstage("v"), ok, ""}, {publish("v", "/t"), ok, "stage"}},
		"published after a stage failed":   {askStages, {unstage("v"), ok, ""}, {stage("v"), codes.Internal, ""}, {publish("v", "/t"), codes.FailedPrecondition, "stage"}},
		"published after it was created":   {askStages, {create("n"), created("v"), ""}, {publish("v", "/t"), ok, "stage"}},
		"only the volume that is unstaged": {askStages, {unstage("v"), ok, ""}, {publish("w", "/t"), ok, ""}, {publish("v", "/t"), ok, "stage"}},

		// A healthy driver, and whatever the specification leaves open.
		"the whole life": {askStages, {create("n"), created("v"), ""}, {create("n"), created("v"), ""}, {stage("v"), ok, ""}, {stage("v"), ok, ""},
			{publish("v", "/t"), ok, ""}, {publish("v", "/t"), ok, ""}, {unpublish("v", "/t"), ok, ""}, {unpublish("v", "/t"), ok, ""},
			{unstage("v"), ok, ""}, {unstage("v"), ok, ""}, {stage("v"), ok, ""}, {publish("v", "/t"), ok, ""}, {unpublish("v", "/t"), ok, ""},
			{unstage("v"), ok, ""}, {remove("v"), ok, ""}, {remove("v"), ok, ""}, {create("n"), created("w"), ""}},
		"retries after errors": {askStages, {unstage("v"), ok, ""}, {stage("v"), codes.Internal, ""}, {stage("v"), codes.Unavailable, ""}, {stage("v"), ok, ""},
			{publish("v", "/t"), codes.Internal, ""}, {publish("v", "/t"), codes.Aborted, ""}, {publish("v", "/t"), ok, ""}},
		"pending, unavailable, gone":        {{publish("v", "/t"), ok, ""}, {publish("v", "/t"), codes.Aborted, ""}, {unpublish("v", "/t"), ok, ""}, {unpublish("v", "/t"), codes.NotFound, ""}},
		"an error in between":               {{publish("v", "/t"), ok, ""}, {publish("v", "/t"), codes.Unavailable, ""}, {publish("v", "/t"), codes.AlreadyExists, ""}},
		"other arguments":                   {{publish("v", "/t"), ok, ""}, {publish("v", "/u"), codes.FailedPrecondition, ""}, {publish("v", "/u"), codes.AlreadyExists, ""}},
		"unpublished in between":            {{publish("v", "/t"), ok, ""}, {unpublish("v", "/t"), ok, ""}, {publish("v", "/t"), codes.InvalidArgument, ""}},
		"snapshot ready":                    {{snapshot("n"), cut1("a", false), ""}, {snapshot("n"), cut1("a", true), ""}},
		"deleted in between":                {{create("n"), created("a"), ""}, {remove("a"), ok, ""}, {create("n"), created("b"), ""}},
		"expanded in between":               {{create("n"), created("a"), ""}, {&csi.ControllerExpandVolumeRequest{VolumeId: "a"}, ok, ""}, {create("n"), codes.AlreadyExists, ""}},
		"no stage capability":               {{&csi.NodeGetCapabilitiesRequest{}, capabilities(csi.NodeServiceCapability_RPC_GET_VOLUME_STATS), ""}, {unstage("v"), ok, ""}, {publish("v", "/t"), ok, ""}},
		"capabilities not seen":             {{unstage("v"), ok, ""}, {publish("v", "/t"), ok, ""}},
		"the volume's beginning not seen":   {askStages, {publish("v", "/t"), ok, ""}},
		"created again, perhaps staged":     {askStages, {unpublish("v", "/t"), ok, ""}, {create("n"), created("v"), ""}, {publish("v", "/t"), ok, ""}},
		"staged by a call without an end":   {askStages, {unstage("v"), ok, ""}, {stage("v"), "hang", ""}, {publish("v", "/t"), ok, ""}},
		"unstage failed":                    {askStages, {unstage("v"), codes.Internal, ""}, {publish("v", "/t"), ok, ""}},
		"reads may be answered differently": {{&csi.NodeGetInfoRequest{}, &csi.NodeGetInfoResponse{NodeId: "a"}, ""}, {&csi.NodeGetInfoRequest{}, &csi.NodeGetInfoResponse{NodeId: "b"}, ""}},
	} {
		t.Run(name, func(t *testing.T) {
			var at atomic.Int64
			hangs := make(chan struct{}, 1)
			path := filepath.Join(socketDir(t), "d")
			serveCSI(t, path, func(ctx context.Context, method string, _ proto.Message) (proto.Message, error) {
				switch answer := steps[at.Load()].answer.(type) {
				case proto.Message:
					return answer, nil
				case codes.Code:
					_, m := methodNamed(t, method)
					return newMessage(t, m.Output()), status.Error(answer, "as told")
				default:
					hangs <- struct{}{}
					<-ctx.Done()
					return nil, ctx.Err()
				}
			})
			p := startProxy(t, path, Options{})
			for i, s := range steps {
				at.Store(int64(i))
				ctx, cancel := context.WithCancel(t.Context())
				if s.answer == "hang" {
					go func() { <-hangs; cancel() }()
				}
				// The record says how it ended.
				_, _ = invoke(t, ctx, connect(t, p.path), s.method(), s.request)
				cancel()
				call := p.wait(i + 1)[i]
				var found []string
				for _, f := range call.Findings {
					found = append(found, f.Rule)
				}
				if got := strings.Join(found, " "); got != s.want || call.Name() != s.method() {
					t.Errorf("call %d: %s %s: found %q, want %q", i+1, call.Name(), call.Code, call.Findings, s.want)
				}
			}
		})
	}
}

// A call of the kubelet that is not answered within its 2 minutes, and is asked again.
func TestFindingsOfSlowCalls(t *testing.T) {
	for _, c := range []struct {
		name  string
		takes time.Duration
		again time.Duration // until it is asked again
		want  string
	}{
		{"2 minutes, asked again", 2 * time.Minute, time.Second, "timeout"},
		{"2 minutes, asked again much later", 2 * time.Minute, time.Hour, ""},
		{"less, asked again", time.Minute, time.Second, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var ahead atomic.Int64 // of the clock, in nanoseconds
			reached := make(chan struct{}, 1)
			path := filepath.Join(socketDir(t), "d")
			hang := true
			serveCSI(t, path, func(ctx context.Context, _ string, _ proto.Message) (proto.Message, error) {
				if !hang {
					return &csi.NodePublishVolumeResponse{}, nil
				}
				reached <- struct{}{}
				<-ctx.Done()
				return nil, ctx.Err()
			})
			p := startProxyAt(t, path, Options{}, func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
			ctx, cancel := context.WithCancel(t.Context())
			answered := make(chan error, 1)
			go func() {
				_, err := invoke(t, ctx, connect(t, p.path), "NodePublishVolume", publish("v", "/t"))
				answered <- err
			}()
			<-reached
			ahead.Add(int64(c.takes))
			cancel()
			if err := <-answered; !errors.Is(err, context.Canceled) && status.Code(err) != codes.Canceled {
				t.Fatal(err)
			}
			first := p.wait(1)[0]
			if first.End != Cancelled || first.Duration() < c.takes || len(first.Findings) > 0 {
				t.Errorf("%+v", first)
			}
			ahead.Add(int64(c.again))
			hang = false
			if _, err := invoke(t, t.Context(), connect(t, p.path), "NodePublishVolume", publish("v", "/t")); err != nil {
				t.Fatal(err)
			}
			second := p.wait(2)[1]
			if found := len(second.Findings) == 1 && second.Findings[0].Rule == c.want; found != (c.want != "") || second.Attempt != 2 {
				t.Errorf("%+v", second)
			}
		})
	}
}

// The omitted calls may have been anything: nothing is concluded from calls before them.
func TestNoFindingsAcrossAGap(t *testing.T) {
	path := filepath.Join(socketDir(t), "d")
	var code atomic.Int64
	serveCSI(t, path, func(context.Context, string, proto.Message) (proto.Message, error) {
		return &csi.NodePublishVolumeResponse{}, status.Error(codes.Code(code.Load()), "as told")
	})
	p := startProxy(t, path, Options{})
	c := connect(t, p.path)
	if _, err := invoke(t, t.Context(), c, "NodePublishVolume", publish("v", "/t")); err != nil {
		t.Fatal(err)
	}
	p.wait(1)
	p.rec.Missed(time.Second)
	code.Store(int64(codes.AlreadyExists))
	if _, err := invoke(t, t.Context(), c, "NodePublishVolume", publish("v", "/t")); err == nil {
		t.Fatal("no error")
	}
	if again := p.wait(2)[1]; len(again.Findings) > 0 {
		t.Errorf("%+v", again)
	}
}
