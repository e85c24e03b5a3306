package system

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

// TestSettingsThatHideMounts tries each setting in drivers.md: whether others, such as the kubelet,
// see the mounts of a unit that has it.
func TestSettingsThatHideMounts(t *testing.T) {
	settings := map[string][]string{} // by the first word of the line in drivers.md
	page, err := os.ReadFile(filepath.Join(built.Root(t), "packaging", "doc", "drivers.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range regexp.MustCompile(`(?m)^    (hides|hides, 257|harmless|forbids): +(.*)$`).FindAllStringSubmatch(string(page), -1) {
		settings[line[1]] = append(settings[line[1]], strings.Split(line[2], ", ")...)
	}
	if len(settings) != 4 {
		t.Fatalf("drivers.md lists %q", settings)
	}
	onMain(t, func(t *testing.T, suite string) {
		m := nspawn.New(t, suite)
		type trial struct {
			unit, setting, effect string
		}
		var all []trial
		start := []string{"systemctl", "start"}
		for effect, list := range settings {
			for _, setting := range list {
				if effect == "hides, 257" && suite != "trixie" {
					continue
				}
				tried := trial{fmt.Sprintf("mount-%d.service", len(all)), setting, effect}
				all = append(all, tried)
				start = append(start, tried.unit)
				m.Write("/etc/systemd/system/"+tried.unit, "[Service]\nType=oneshot\nRemainAfterExit=yes\n"+
					regexp.MustCompile(` (\w+=)`).ReplaceAllString(setting, "\n$1")+
					"\nExecStart=/bin/mount -t tmpfs "+tried.unit+" /mnt\n")
			}
		}
		m.Boot()
		_, _ = m.Try(start...) // fails for settings that forbid mounting
		mounts := m.Run("cat", "/proc/1/mountinfo")
		for _, tried := range all {
			if out, _ := m.Try("systemd-analyze", "verify", "--man=no", tried.unit); strings.Contains(out, "Unknown key") {
				if !slices.Contains(newer[suite], tried.setting) {
					t.Errorf("%s: this systemd does not know it", tried.setting)
				}
				continue
			}
			mounted := m.Run("systemctl", "show", "--value", "--property=Result", tried.unit) == "success\n"
			seen := strings.Contains(mounts, " "+tried.unit+" ")
			if want := tried.effect != "forbids"; mounted != want {
				t.Errorf("%s: could mount: %t, want %t\n%s", tried.setting, mounted, want, m.Journal("-u", tried.unit))
			}
			if want := tried.effect == "harmless"; seen != want {
				t.Errorf("%s: others see the mount: %t, want %t", tried.setting, seen, want)
			}
		}
	})
}

// newer are the settings for which a systemd is too old.
var newer = map[string][]string{"bullseye": {"PrivateIPC=yes", "NoExecPaths=/root"}}
