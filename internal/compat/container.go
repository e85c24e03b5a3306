package compat

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"csi-registrar/internal/safetext"
)

// isRegistrar reports whether the container runs node-driver-registrar: by its image, by
// the program it starts, or by the flag that no other program has.
func (c container) isRegistrar() bool {
	image, _, _ := strings.Cut(c.Image, "@")
	image, _, _ = strings.Cut(path.Base(image), ":")
	command := slices.Concat(c.Command, c.Args)
	return strings.Contains(image, "node-driver-registrar") ||
		len(c.Command) > 0 && strings.Contains(path.Base(c.Command[0]), "node-driver-registrar") ||
		slices.ContainsFunc(command, func(arg string) bool { return strings.Contains(arg, "-kubelet-registration-path") })
}

// flags is the command line without the program, $(VAR) not expanded yet.
func (c container) flags() ([]string, error) {
	if len(c.Command) == 0 {
		return c.Args, nil
	}
	program := path.Base(c.Command[0])
	if slices.Contains([]string{"sh", "bash", "ash", "dash"}, program) {
		return nil, fmt.Errorf("it is started by a shell (%s), whose script is not parsed", program)
	}
	return slices.Concat(c.Command[1:], c.Args), nil
}

// flag finds the value of a flag, expanded; found is false if it is not there.
func (c container) flag(name string) (value string, found bool, err error) {
	args, err := c.flags()
	if err != nil {
		return "", false, err
	}
	for i, arg := range args {
		if !strings.HasPrefix(arg, "-") {
			continue
		}
		key, given, hasValue := strings.Cut(strings.TrimPrefix(arg[1:], "-"), "=")
		if key != name {
			continue
		}
		if !hasValue {
			if i+1 == len(args) {
				return "", false, fmt.Errorf("--%s has no value", name)
			}
			given = args[i+1]
		}
		if value, err = c.expand(given); err != nil {
			return "", false, fmt.Errorf("--%s: %w", name, err)
		}
		found = true // the last one counts, as with package flag
	}
	return value, found, nil
}

// expand replaces $(NAME) as Kubernetes does: from the literal env of the container,
// whose values may refer to entries before them; $$ is a $.
func (c container) expand(s string) (string, error) {
	// In order and once each, not by recursion: entries that name each other twice would
	// never end.
	vars := make(map[string]variable, len(c.Env))
	for _, e := range c.Env {
		var v variable
		if e.ValueFrom != nil {
			v.err = fmt.Errorf("the variable %s has a valueFrom: its value is not in the manifest", safetext.Word(e.Name))
		} else {
			v.value, v.err = c.replace(e.Value, vars)
		}
		vars[e.Name] = v
	}
	return c.replace(s, vars)
}

// variable is the value of an entry of env, or why it is not known.
type variable struct {
	value string
	err   error
}

// maxValue limits a value: entries that double each other grow without limit.
const maxValue = 64 << 10

func (c container) replace(s string, vars map[string]variable) (string, error) {
	if isTemplate(s) {
		return "", fmt.Errorf("%w: %s", errIsTemplate, safetext.Quote(s))
	}
	var err error
	size := len(s)
	reference := regexp.MustCompile(`\$\$|\$\([^)]*\)`)
	value := reference.ReplaceAllStringFunc(s, func(ref string) string {
		if ref == "$$" {
			return "$"
		}
		name := ref[2 : len(ref)-1]
		v, known := vars[name]
		if !known {
			v.err = fmt.Errorf("the variable %s is not in the container's env; values from envFrom are not in the manifest", safetext.Word(name))
		}
		if size += len(v.value); size > maxValue {
			v = variable{err: fmt.Errorf("the value has more than %d bytes", maxValue)}
		}
		err = cmp.Or(err, v.err)
		return v.value
	})
	if err != nil {
		return "", err
	}
	return value, nil
}

// hostPath maps a path in the container to the path on the node.
func (p podSpec) hostPath(c container, file string) (string, error) {
	best := c.mountOf(file)
	if best.MountPath == "" {
		return "", fmt.Errorf("no volume is mounted where %s is, so only the container itself sees it", safetext.Word(file))
	}
	i := slices.IndexFunc(p.Volumes, func(v volume) bool { return v.Name == best.Name })
	if i < 0 {
		return "", fmt.Errorf("%s is on the volume %s, which the pod does not define", safetext.Word(file), safetext.Word(best.Name))
	}
	v := p.Volumes[i]
	if v.HostPath == nil {
		return "", fmt.Errorf("%s is on the volume %s, which is %s: its path on the node is not known",
			safetext.Word(file), safetext.Word(v.Name), v.kindOf())
	}
	sub := best.SubPath
	if best.SubPathExpr != "" {
		var err error
		if sub, err = c.expand(best.SubPathExpr); err != nil {
			return "", fmt.Errorf("the subPathExpr of volume %s: %w", safetext.Word(v.Name), err)
		}
	}
	for _, s := range []string{v.HostPath.Path, sub} {
		if isTemplate(s) {
			return "", fmt.Errorf("the volume %s: %w: %s", safetext.Word(v.Name), errIsTemplate, safetext.Quote(s))
		}
	}
	if !strings.HasPrefix(v.HostPath.Path, "/") {
		return "", fmt.Errorf("the hostPath of volume %s is not absolute: %s", safetext.Word(v.Name), safetext.Quote(v.HostPath.Path))
	}
	rel := strings.TrimPrefix(path.Clean(file), best.MountPath)
	return path.Join(v.HostPath.Path, path.Join("/", sub), rel), nil
}

// mountOf finds the mount that a path in the container is on, the deepest one.
func (c container) mountOf(file string) (best volumeMount) {
	for _, m := range c.VolumeMounts {
		if contains(m.MountPath, file) && len(path.Clean(m.MountPath)) > len(best.MountPath) {
			best = m
			best.MountPath = path.Clean(m.MountPath)
		}
	}
	return best
}

// kindOf names the kind of a volume that is not a hostPath.
func (v volume) kindOf() string {
	if kinds := slices.Sorted(maps.Keys(v.Other)); len(kinds) > 0 {
		return "of kind " + safetext.Word(kinds[0])
	}
	return "of kind emptyDir" // the default of Kubernetes
}

// contains reports whether a path is the directory or is in it.
func contains(dir, file string) bool {
	file, clean := path.Clean(file), path.Clean(dir)
	return dir != "" && (file == clean || clean == "/" || strings.HasPrefix(file, clean+"/"))
}

var errIsTemplate = errors.New("this is a template, not a manifest")
